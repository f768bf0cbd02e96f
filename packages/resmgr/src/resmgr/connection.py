"""One connection that all calls of a manager share: what is asked in one turn of the loop travels in one write.

A general client's way through pool, retries and parser costs several times what a call costs the server; here a call
is one future. Answers come in the order of the calls, so the connection needs no numbers.

Invariants (tests: `test_resmgr_connection.py`):
- every call ends: with its answer, the server's error, or the connection's;
- an answer that nobody waits for any more is passed over, and does not become the next call's;
- when the oldest call has had no answer for `io_timeout` seconds, the connection ends, and all its calls with it.
"""

import asyncio
import ssl
from collections import deque
from typing import Any, cast

from redis import exceptions as redis_errors
from redis.asyncio.connection import parse_url

Command = tuple[str | bytes | int, ...]

_KINDS = {
    "LOADING": redis_errors.BusyLoadingError,
    "BUSY": redis_errors.BusyLoadingError,  # a script runs for long
    "MISCONF": redis_errors.BusyLoadingError,  # its disk is full
    "MASTERDOWN": redis_errors.BusyLoadingError,  # a replica whose master is away
    "CLUSTERDOWN": redis_errors.BusyLoadingError,
    "NOREPLICAS": redis_errors.BusyLoadingError,
    "OOM": redis_errors.OutOfMemoryError,
    "READONLY": redis_errors.ReadOnlyError,
    "NOAUTH": redis_errors.AuthenticationError,
    "WRONGPASS": redis_errors.AuthenticationError,
    "NOPERM": redis_errors.NoPermissionError,
}


class NotRedis(redis_errors.ConnectionError):
    """What the other side said is no reply, or it hung up without having said anything."""


def packed(command: Command) -> bytes:
    """A command in the form of the protocol (RESP)."""
    parts = [b"*%d\r\n" % len(command)]
    for part in command:
        data = part if isinstance(part, bytes) else str(part).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(parts)


def error_of(line: bytes) -> Exception:
    text = line.decode(errors="replace")
    if text.startswith("ERR max number of clients"):
        return redis_errors.BusyLoadingError(text)
    return _KINDS.get(text.partition(" ")[0], redis_errors.ResponseError)(text)


class Replies:
    """Takes bytes as they come, gives the replies (RESP 2) that are complete."""

    def __init__(self) -> None:
        self._rest = b""
        self._open: list[tuple[list[Any], int]] = []

    def feed(self, data: bytes) -> list[Any]:
        data = self._rest + data if self._rest else data
        at, replies = 0, []
        while (end := data.find(b"\r\n", at)) >= 0:
            kind, line, after = data[at], data[at + 1 : end], end + 2
            value: Any = None
            if kind == 36 and (size := int(line)) >= 0:  # $
                if len(data) < after + size + 2:
                    break
                value, after = data[after : after + size], after + size + 2
            elif kind == 42 and (size := int(line)) > 0:  # *
                self._open.append(([], size))
                at = after
                continue
            elif kind == 42:
                value = [] if size == 0 else None
            elif kind == 58:  # :
                value = int(line)
            elif kind == 43:  # +
                value = line
            elif kind == 45:  # -
                value = error_of(line)
            elif kind != 36:
                raise NotRedis(f"the server sent {data[at : at + 40]!r}, which is no reply")
            at = after
            while self._open:
                rows, size = self._open[-1]
                rows.append(value)
                if len(rows) < size:
                    break
                value = rows
                self._open.pop()
            else:
                replies.append(value)
        self._rest = data[at:]
        return replies


class _Line(asyncio.Protocol):
    """The connection as the loop drives it."""

    def __init__(self, io_timeout: float) -> None:
        self.closed = False
        self._loop = asyncio.get_running_loop()
        self._io_timeout = io_timeout
        self._replies = Replies()
        self._asked: deque[tuple[asyncio.Future[Any], float]] = deque()
        self._unsent: list[bytes] = []
        self._watch: asyncio.TimerHandle | None = None
        self._reason: Exception = NotRedis("the server closed the connection without a word")
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def ask(self, command: bytes) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = self._loop.create_future()
        if not self._unsent:
            self._loop.call_soon(self._send)
        self._unsent.append(command)
        self._asked.append((answer, self._loop.time()))
        if self._watch is None:
            self._watch = self._loop.call_later(self._io_timeout, self._look)
        return answer

    def _send(self) -> None:
        commands, self._unsent = self._unsent, []
        if not self.closed:
            self._transport.write(b"".join(commands))

    def data_received(self, data: bytes) -> None:
        try:
            replies = self._replies.feed(data)
        except ValueError as error:
            self.end(NotRedis(f"the server sent a length that is none ({error})"))
            return
        except NotRedis as error:
            self.end(error)
            return
        if replies:
            self._reason = redis_errors.ConnectionError("the server closed the connection")
        for reply in replies:
            if not self._asked:
                self.end(redis_errors.ConnectionError("the server answered without having been asked"))
                return
            answer, _ = self._asked.popleft()
            if answer.done():
                continue
            if isinstance(reply, Exception):
                answer.set_exception(reply)
            else:
                answer.set_result(reply)

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        if self._watch is not None:
            self._watch.cancel()
        for answer, _ in self._asked:
            if not answer.done():
                answer.set_exception(self._reason)
        self._asked.clear()

    def _look(self) -> None:
        """Ends the connection when the oldest call has waited for too long; looks again when it could have."""
        self._watch = None
        if not self._asked:
            return
        left = self._asked[0][1] + self._io_timeout - self._loop.time()
        if left <= 0:
            self.end(redis_errors.TimeoutError(f"no answer within {self._io_timeout} s"))
        else:
            self._watch = self._loop.call_later(left, self._look)

    def end(self, reason: Exception) -> None:
        self.closed = True
        self._reason = reason
        self._transport.abort()


class Connection:
    """Connects at the first call, and again at the first one after the connection has ended."""

    def __init__(self, url: str, io_timeout: float) -> None:
        self._parts: dict[str, Any] = dict(parse_url(url))
        self._io_timeout = io_timeout
        self._line: _Line | None = None
        self._connecting = asyncio.Lock()
        self._closed = False

    async def call(self, command: bytes) -> Any:
        """The reply to a packed command. Raises what redis-py raises."""
        line = self._line
        if line is None or line.closed:
            line = await self._connected()
        return await line.ask(command)

    def close(self) -> None:
        """Calls under way end with ConnectionError."""
        self._closed = True
        if self._line is not None:
            self._line.end(redis_errors.ConnectionError("the manager closed the connection"))

    async def _connected(self) -> _Line:
        async with self._connecting:
            if self._line is not None and not self._line.closed:
                return self._line
            if self._closed:
                raise redis_errors.ConnectionError("the manager closed the connection")
            try:
                async with asyncio.timeout(self._io_timeout):
                    self._line = await self._connect()
            except OSError as error:  # asyncio.TimeoutError is one
                raise redis_errors.ConnectionError(
                    str(error) or f"no connection within {self._io_timeout} s"
                ) from error
            return self._line

    async def _connect(self) -> _Line:
        loop = asyncio.get_running_loop()
        if "path" in self._parts:
            _, line = await loop.create_unix_connection(lambda: _Line(self._io_timeout), self._parts["path"])
        else:
            host, port = self._parts.get("host", "localhost"), self._parts.get("port", 6379)
            _, line = await loop.create_connection(lambda: _Line(self._io_timeout), host, port, ssl=_tls(self._parts))
        try:
            await self._greet(line)
        except BaseException:
            line.end(redis_errors.ConnectionError("the server did not accept us"))
            raise
        return line

    async def _greet(self, line: _Line) -> None:
        """User, password and database are those of the URL."""
        user, password = self._parts.get("username"), self._parts.get("password")
        if password is not None:
            await line.ask(packed(("AUTH", user, password) if user else ("AUTH", password)))
        if self._parts.get("db"):
            await line.ask(packed(("SELECT", self._parts["db"])))


def _tls(parts: dict[str, Any]) -> ssl.SSLContext | None:
    """For rediss:// URLs, with the options of redis-py: ssl_ca_certs, ssl_certfile, ssl_keyfile, ssl_cert_reqs."""
    if "SSL" not in getattr(parts.get("connection_class"), "__name__", ""):
        return None
    context = ssl.create_default_context(cafile=parts.get("ssl_ca_certs"))
    if parts.get("ssl_cert_reqs") == "none":
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if parts.get("ssl_certfile"):
        context.load_cert_chain(parts["ssl_certfile"], parts.get("ssl_keyfile"))
    return context
