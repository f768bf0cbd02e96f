"""Keep-alive connections to one HTTP server, each carrying one request at a time.

Invariants (tests/llmproxy/test_llmproxy_upstream.py):
- every request that is sent and not cancelled ends in exactly one call: `on_end` or `on_lost`;
- `on_end` means that the answer was framed (a length or chunks) and has arrived whole; an answer cut short, or one
  whose only end is the end of the connection, is lost;
- a connection goes back to the pool only when its answer was whole and nothing came after it, so that an answer can
  never be taken for that of a later request;
- a request is sent again only when the server closed an idle connection before one byte of answer, and on a new one.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import httptools

from .errors import WorkerLost

_JOIN_BELOW = 65_536
"""Head and body up to this size are written as one buffer; copying more costs more than a second write."""
_HEADER_LIMIT = 65_536
_NOTHING = (b"", b"")
CONNECT_TIMEOUT = 5.0


class Receiver(Protocol):
    """Whoever asked. Each piece of an answer is handed over as it arrives, `flush` after each read."""

    upstream: Upstream | None
    """Set when the request is sent."""

    def on_head(self, upstream: Upstream) -> None: ...
    def on_body(self, data: bytes) -> None: ...
    def flush(self) -> None: ...
    def on_end(self) -> None: ...
    def on_lost(self, reason: str) -> None: ...


class Upstream(asyncio.Protocol):
    """One connection."""

    __slots__ = (
        "_answered",
        "_complete",
        "_head_bytes",
        "_keep",
        "_parser",
        "_pool",
        "_request",
        "_reused",
        "headers",
        "receiver",
        "status",
        "transport",
    )

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._parser: Any = httptools.HttpResponseParser(self)
        self.transport: asyncio.Transport = cast("asyncio.Transport", None)
        self.receiver: Receiver | None = None
        self._request = _NOTHING
        self._reused = False
        self._answered = self._complete = self._keep = False
        self._head_bytes = 0
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []

    def send(self, receiver: Receiver, head: bytes, body: bytes, *, reused: bool) -> None:
        self.receiver = receiver
        receiver.upstream = self
        self._request = (head, body)
        self._reused = reused
        self._answered = self._complete = False
        self._head_bytes = 0
        if len(body) <= _JOIN_BELOW:
            self.transport.write(head + body)
        else:
            self.transport.writelines((head, body))

    def drop(self) -> None:
        """The receiver is gone: close, which tells the server, and hand over nothing more."""
        self.receiver = None
        self.transport.abort()

    # asyncio calls these.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            raise
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self._complete:
                self._break(f"malformed answer: {error}")
                return
            self._keep = False
        receiver = self.receiver
        if receiver is None:  # nobody asked for this
            self.transport.abort()
        elif not self._complete:
            receiver.flush()
        else:
            self.receiver = None
            self._request = _NOTHING  # an idle connection holds no body
            if self._keep:
                self._pool.put(self)
            else:
                self.transport.close()
            receiver.on_end()

    def connection_lost(self, error: Exception | None) -> None:
        self._pool.forget(self)
        receiver, self.receiver = self.receiver, None
        if receiver is None:
            return
        if self._reused and not self._answered:
            self._pool.send_fresh(receiver, *self._request)
        else:
            where = "in the middle of an answer" if self._answered else "before an answer"
            receiver.on_lost(f"connection lost {where}" + (f": {error}" if error else ""))

    # httptools calls these.

    def on_message_begin(self) -> None:
        if self._complete:
            self._keep = False  # more than was asked for: what follows is not trusted
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes <= _HEADER_LIMIT:
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status < 200 or self._complete or self.receiver is None:
            return
        if self._head_bytes > _HEADER_LIMIT:
            self._break(f"answer with more than {_HEADER_LIMIT} bytes of headers")
            return
        self.receiver.on_head(self)

    def on_body(self, data: bytes) -> None:
        if self.receiver is not None and not self._complete:
            self.receiver.on_body(data)

    def on_message_complete(self) -> None:
        if self.status >= 200:
            self._keep = not self._complete and self._parser.should_keep_alive()
            self._complete = True

    def _break(self, reason: str) -> None:
        receiver, self.receiver = self.receiver, None
        self.transport.abort()
        if receiver is not None:
            receiver.on_lost(reason)


class Pool:
    """Connections to the server at `url`. The last one used is used next, so that idle ones can close."""

    def __init__(
        self, url: str, *, connect_timeout: float = CONNECT_TIMEOUT, on_closed: Callable[[], None] | None = None
    ) -> None:
        """`on_closed` is told when the server ends a connection that carries nothing."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an http(s) URL such as http://127.0.0.1:8000")
        self.host = parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.authority = parts.netloc.rpartition("@")[2].encode("ascii")
        self.prefix = parts.path.rstrip("/").encode("ascii")
        self.url = f"{parts.scheme}://{(self.authority + self.prefix).decode()}"  # without a password
        self.idle: list[Upstream] = []
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._connect_timeout = connect_timeout
        self._all: set[Upstream] = set()
        self._connecting: dict[Receiver, asyncio.Task[None]] = {}
        self._on_closed = on_closed
        self._closed = False

    def __len__(self) -> int:
        return len(self._all)

    def send(self, receiver: Receiver, head: bytes, body: bytes) -> None:
        """Send a request; `receiver` gets the answer."""
        while self.idle:
            upstream = self.idle.pop()
            if not upstream.transport.is_closing():
                upstream.send(receiver, head, body, reused=True)
                return
        self.send_fresh(receiver, head, body)

    def send_fresh(self, receiver: Receiver, head: bytes, body: bytes) -> None:
        task = asyncio.get_running_loop().create_task(self._connect_and_send(receiver, head, body))
        self._connecting[receiver] = task

    def put(self, upstream: Upstream) -> None:
        if self._closed:
            upstream.transport.close()
        else:
            self.idle.append(upstream)

    def cancel(self, receiver: Receiver) -> None:
        """The receiver wants no answer any more; nothing further is handed to it."""
        if task := self._connecting.pop(receiver, None):
            task.cancel()
        elif receiver.upstream is not None and receiver.upstream.receiver is receiver:
            receiver.upstream.drop()

    def forget(self, upstream: Upstream) -> None:
        self._all.discard(upstream)
        if upstream in self.idle:
            self.idle.remove(upstream)
            if self._on_closed is not None:
                self._on_closed()

    def close(self) -> None:
        """Close idle connections now and the others after their answers."""
        self._closed = True
        idle, self.idle = self.idle, []
        for upstream in idle:
            upstream.transport.close()

    def abort(self) -> None:
        """Close all connections; what is under way is lost."""
        self._closed = True
        connecting, self._connecting = self._connecting, {}
        for receiver, task in connecting.items():
            task.cancel()
            receiver.on_lost("closed here")
        for upstream in list(self._all):
            upstream.transport.abort()

    async def _connect_and_send(self, receiver: Receiver, head: bytes, body: bytes) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, upstream = await loop.create_connection(
                    lambda: Upstream(self), self.host, self.port, ssl=self._ssl
                )
        except (OSError, TimeoutError) as error:
            if self._connecting.pop(receiver, None):
                receiver.on_lost(f"cannot connect to {self.host}:{self.port}: {str(error) or 'no answer'}")
            return
        self._all.add(upstream)
        if not self._connecting.pop(receiver, None):
            upstream.transport.close()
        elif upstream.transport.is_closing():
            receiver.on_lost("connection lost before the request was sent")
        else:
            upstream.send(receiver, head, body, reused=False)


class Answer:
    """A whole answer, kept in memory up to `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self.status = 0
        self.pieces: list[bytes] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.upstream: Upstream | None = None
        self._room = limit

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    def on_head(self, upstream: Upstream) -> None:
        self.status = upstream.status

    def on_body(self, data: bytes) -> None:
        self._room -= len(data)
        if self._room >= 0:
            self.pieces.append(data)

    def flush(self) -> None:
        if self._room < 0:
            self.on_lost("answer is too long")
            assert self.upstream is not None
            self.upstream.drop()

    def on_end(self) -> None:
        if self._room < 0:
            self.on_lost("answer is too long")
        elif not self.done.done():
            self.done.set_result(None)

    def on_lost(self, reason: str) -> None:
        if not self.done.done():
            self.done.set_exception(WorkerLost("", reason))


def head(pool: Pool, method: str, path: str, size: int, headers: bytes = b"") -> bytes:
    """The head of a JSON request."""
    return b"%b %b%b HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%b\r\n" % (
        method.encode(),
        pool.prefix,
        path.encode(),
        pool.authority,
        size,
        headers,
    )


async def call(
    pool: Pool, method: str, path: str, body: bytes = b"", headers: bytes = b"", *, limit: int = 16 << 20
) -> Answer:
    """One request and its whole answer. Raises WorkerLost; cancelling closes the connection."""
    answer = Answer(limit)
    pool.send(answer, head(pool, method, path, len(body), headers), body)
    try:
        await answer.done
    except asyncio.CancelledError:
        pool.cancel(answer)
        raise
    return answer
