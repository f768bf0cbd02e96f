"""A line between two processes: messages over TCP, those of a moment together in one frame, its length before it.

Ray carries a call for as much CPU time as this carries twenty, so what is said for each turn goes this way.

Invariants (tests/rollart/test_rollart_distributed_line.py):
- messages are heard in the order in which they were posted, each once and whole, however TCP cuts them
  (test_messages_come_whole_and_in_order);
- who does not know a line's secret is not heard, and a secret is good for one caller
  (test_only_the_expected_is_heard).
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Callable
from typing import Any, cast

import msgspec

# What is posted while more is under way waits this long for company: a third less CPU time when it ends at random.
LINGER = 0.001
_SECRET_BYTES = 32
_LENGTH_BYTES = 4
_encode = msgspec.msgpack.Encoder().encode


class Address(msgspec.Struct, frozen=True):
    """Where a line is expected, and what its caller says first."""

    host: str
    port: int
    secret: bytes


class Line(asyncio.Protocol):
    """One end. `heard` is given each frame, an encoded list of messages. What is posted before the line is up goes
    first; what is posted after it has `ended` goes nowhere.
    """

    def __init__(self, heard: Callable[[bytes], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self.greeting = b""
        self.sent = 0
        """Frames."""
        self._heard = heard
        self._posted: list[Any] = []
        self._rest = bytearray()
        self._transport: asyncio.Transport | None = None

    def post(self, message: Any, *, linger: bool) -> None:
        """Send it with what else is posted in this turn of the loop, or where it may `linger`, a little later."""
        self._posted.append(message)
        if len(self._posted) == 1:
            if linger:
                self._loop.call_later(LINGER, self._flush)
            else:
                self._loop.call_soon(self._flush)

    def close(self) -> None:
        """Nothing is heard or sent any more."""
        if self._transport is not None:
            self._transport.abort()
        self.connection_lost(None)

    def _flush(self) -> None:
        if self._transport is None or self.ended.done() or not self._posted:
            return
        frame = _encode(self._posted)
        self._posted = []
        self._transport.write(len(frame).to_bytes(_LENGTH_BYTES) + frame)
        self.sent += 1

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none, and does the same
        if self.ended.done():
            self._transport.abort()
            return
        if self.greeting:
            self._transport.write(self.greeting)
        self._flush()

    def data_received(self, data: bytes) -> None:
        self._rest += data
        while len(self._rest) >= _LENGTH_BYTES and not self.ended.done():
            end = _LENGTH_BYTES + int.from_bytes(self._rest[:_LENGTH_BYTES])
            if len(self._rest) < end:
                return
            frame = bytes(self._rest[_LENGTH_BYTES:end])
            del self._rest[:end]
            self._heard(frame)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


async def dial(line: Line, address: Address) -> None:
    """Connect a line to the one that is expected there. Raises OSError."""
    line.greeting = address.secret
    await asyncio.get_running_loop().create_connection(lambda: line, address.host, address.port)


class Door:
    """Listens for one line at a time."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._expected: tuple[bytes, Line] | None = None
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        self._server = await asyncio.get_running_loop().create_server(lambda: _Guest(self._admit), self._host, 0)

    def expect(self, line: Line) -> Address:
        """Where `line` is reached; nobody else is let in any more."""
        assert self._server is not None, "open comes first"
        secret = secrets.token_bytes(_SECRET_BYTES)
        self._expected = secret, line
        return Address(self._host, self._server.sockets[0].getsockname()[1], secret)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def _admit(self, secret: bytes) -> Line | None:
        if self._expected is None or not hmac.compare_digest(secret, self._expected[0]):
            return None
        (_, line), self._expected = self._expected, None
        return line


class _Guest(asyncio.Protocol):
    """A caller who has yet to say the secret."""

    def __init__(self, admit: Callable[[bytes], Line | None]) -> None:
        self._admit = admit
        self._said = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._said += data
        if len(self._said) < _SECRET_BYTES:
            return
        line = self._admit(self._said[:_SECRET_BYTES])
        if line is None:
            self._transport.abort()
            return
        self._transport.set_protocol(line)
        line.connection_made(self._transport)
        line.data_received(self._said[_SECRET_BYTES:])
