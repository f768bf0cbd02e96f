"""A worker that answers at once: an HTTP server on an asyncio protocol, as cheap as Python allows.

`python _mock.py PORT [CHUNKS]` answers POSTs whose body holds `"stream": true` with CHUNKS server-sent events, one
write each, and others with one small completion.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import uvloop

_COMPLETION = (
    b'{"id":"cmpl-0","object":"text_completion","model":"m","choices":[{"index":0,"text":" ok",'
    b'"finish_reason":"stop"}],"usage":{"prompt_tokens":100,"completion_tokens":1,"total_tokens":101}}'
)
_MODELS = b'{"object":"list","data":[{"id":"m","object":"model","owned_by":"x","max_model_len":1000000}]}'
_INFO = b'{"model_path":"m","served_model_name":"m","is_generation":true,"weight_version":"default"}'
_EVENT = (
    b'data: {"choices":[{"index":0,"text":" token","token_ids":[1234],"logprobs":null,"finish_reason":null}]}\n\n'
)


def _whole(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


_ANSWERS = {
    b"/v1/models": _whole(_MODELS),
    b"/health": _whole(b"{}"),
    b"/weight_info": _whole(b'{"weight_version":"default"}'),
}
_COMPLETED, _INFORMED = _whole(_COMPLETION), _whole(_INFO)
_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_CHUNK = b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT)
_DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class Mock(asyncio.Protocol):
    """Reads heads and skips bodies; does not look at more than it must."""

    chunks = 0

    def __init__(self) -> None:
        self._buffer = b""
        self._skip = 0
        self._answer = b""
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._skip > 0:
            self._skip -= len(data)
            if self._skip <= 0:
                self._reply(False)
            return
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head, body = self._buffer[:end], self._buffer[end + 4 :]
        self._buffer = b""
        path = head[: head.index(b"\r\n")].split(b" ")[1]
        self._answer = _ANSWERS.get(path) or (_COMPLETED if head.startswith(b"POST") else _INFORMED)
        at = head.lower().find(b"content-length:")
        length = 0 if at < 0 else int(head[at + 15 :].split(b"\r\n", 1)[0])
        self._skip = length - len(body)
        if self._skip <= 0:
            self._reply(b'"stream": true' in body)

    def _reply(self, stream: bool) -> None:
        if stream and self.chunks:
            self._task = asyncio.get_running_loop().create_task(self._stream())
        else:
            self.transport.write(self._answer)

    async def _stream(self) -> None:
        """A write for each event, and a turn of the loop between, so that each is a read at the other end."""
        self.transport.write(_STREAM)
        for _ in range(self.chunks):
            self.transport.write(_CHUNK)
            await asyncio.sleep(0)
        self.transport.write(_DONE)


async def main() -> None:
    Mock.chunks = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    server = await asyncio.get_running_loop().create_server(Mock, "127.0.0.1", int(sys.argv[1]), backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
