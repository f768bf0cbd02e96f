"""A stand-in server that misbehaves when told to: `python faulty.py [PORT] [DELAY]`, then POST /fault.

Its kinds, each for the next `count` generations: "500" and "400" answer so; "truncate" closes after a few events,
"half whole" in the middle of a whole answer; "half" closes its side and stays; "silent" never answers; "drop" closes
without a byte; "unclosed" ends a stream properly but leaves out its last event; "garbage" sends no HTTP.
"""

from __future__ import annotations

import asyncio
import sys

import msgspec

from llmproxy.standin import StandIn, send, send_event, send_head


class Faulty(StandIn):
    kind = ""
    left = 0

    async def answer(
        self, method: str, path: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter
    ) -> bool:
        if path == "/fault":
            told = msgspec.json.decode(body)
            self.kind, self.left = told["kind"], told["count"]
            send(writer, {})
            return True
        if method == "POST" and ("/v1/" in path and "abort" not in path) and self.left > 0:
            self.left -= 1
            return await self.misbehave(writer)
        return await super().answer(method, path, headers, body, writer)

    async def misbehave(self, writer: asyncio.StreamWriter) -> bool:
        event = {"choices": [{"index": 0, "token_ids": [97], "text": "a", "finish_reason": None}]}
        match self.kind:
            case "500" | "400":
                send(writer, {"error": {"message": "on purpose", "type": "Fault", "param": "it"}}, int(self.kind))
                return True
            case "truncate":
                send_head(writer)
                for _ in range(3):
                    send_event(writer, event)
                await writer.drain()
            case "half":
                send_head(writer)
                send_event(writer, event)
                await writer.drain()
                writer.write_eof()
                await asyncio.sleep(30)
            case "silent":
                await asyncio.sleep(30)
            case "unclosed":
                send_head(writer)
                send_event(writer, event)
                writer.write(b"0\r\n\r\n")
                await writer.drain()
                return True
            case "garbage":
                writer.write(b"SSH-2.0-OpenSSH_9.2\r\n")
                await writer.drain()
            case "half whole":
                writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n{"choices": [')
                await writer.drain()
        return False


async def main() -> None:
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    server = Faulty(delay=float(sys.argv[2]) if len(sys.argv) > 2 else 0.0)
    print(f"on port:{await server.start(port=port)}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
