"""One client's connection: bytes to requests, one answered at a time.

Invariants (tests/llmproxy/test_llmproxy_gateway_protocol.py):
- what the parser does not take as exactly one framing (a length and chunks together, two lengths, bare line ends,
  control characters) ends the connection; no byte of it reaches a worker;
- a body over the limit is refused when its length is read, or when it grows past it; bodies held at one time are
  bounded over all connections, and given back when their requests end;
- what is held grows with what was announced: heads, trailers and chunk extensions are bounded, many small pieces of a
  body are kept as few, and a client that does not read its answers gets no more of them;
- every state has a deadline: a head, a body, an idle connection, an answer, a client that does not read;
- a client that goes away ends its request at the worker.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, cast

import httptools

from .refusals import Refusal, Response

if TYPE_CHECKING:
    from .exchange import Exchange
    from .server import Gateway

_PIPELINED = 8
"""Requests that may wait behind the one being answered."""
_SMALL_PIECE = 4096
"""Pieces of a body below this size are put together as they arrive; an object for each is many times as large."""
_LINGER = 2.0
"""How long a refused client is listened to, so that it reads why before the connection is reset."""
_NEVER = float("inf")

_DROP, _LENGTH, _TRAJECTORY, _TASK, _REQUEST_ID, _AUTHORIZATION, _EXPECT, _CONNECTION, _ORIGIN = range(9)
_SPECIAL = {
    b"host": _DROP,
    b"keep-alive": _DROP,
    b"proxy-connection": _DROP,
    b"proxy-authenticate": _DROP,
    b"proxy-authorization": _DROP,
    b"te": _DROP,
    b"trailer": _DROP,
    b"transfer-encoding": _DROP,
    b"upgrade": _DROP,
    b"content-length": _LENGTH,
    b"x-trajectory-id": _TRAJECTORY,
    b"x-task": _TASK,
    b"x-request-id": _REQUEST_ID,
    b"authorization": _AUTHORIZATION,
    b"expect": _EXPECT,
    b"connection": _CONNECTION,
    b"origin": _ORIGIN,
}


class Request:
    """What arrived. `head` are the header lines that are passed on; `held` the bytes reserved for its body."""

    __slots__ = (
        "authorization",
        "body",
        "connection",
        "expect",
        "head",
        "held",
        "length",
        "method",
        "origin",
        "request_id",
        "task",
        "trajectory",
        "url",
    )

    def __init__(self) -> None:
        self.method = b""
        self.url = b""
        self.head: list[bytes] = []
        self.body = b""
        self.length = 0
        self.held = 0
        self.trajectory = self.task = self.request_id = self.authorization = b""
        self.connection = self.expect = self.origin = b""


class Client(asyncio.Protocol):
    """A connection. `exchange` is the request that a worker answers, `task` one that the gateway does."""

    __slots__ = (
        "_answer_by",
        "_close_after",
        "_deaf",
        "_gateway",
        "_in_head",
        "_parser",
        "_paused",
        "_pieces",
        "_progress",
        "_queue",
        "_reading",
        "_size",
        "_unproductive",
        "answering",
        "deadline",
        "exchange",
        "loopback",
        "task",
        "transport",
    )

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._parser: Any = httptools.HttpRequestParser(self)
        self.transport: asyncio.Transport = cast("asyncio.Transport", None)
        self.exchange: Exchange | None = None
        self.task: asyncio.Task[None] | None = None
        self.answering: Request | None = None
        self.deadline = _NEVER
        self.loopback = False
        self._reading: Request | None = None
        self._pieces: list[bytes | bytearray] = []
        self._size = 0
        self._queue: deque[Request] = deque()
        self._in_head = False
        self._unproductive = 0  # bytes read since the last of a body: of a head, a trailer, a chunk's extension
        self._progress = False
        self._answer_by = _NEVER
        self._close_after = False
        self._deaf = False
        self._paused = False

    # asyncio calls these.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername")
        self.loopback = bool(peer) and (peer[0].startswith("127.") or peer[0] == "::1")
        self.deadline = self._gateway.clock + self._gateway.config.head_timeout
        self._gateway.joined(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._deaf = True
        self._gateway.left(self)
        for request in (self._reading, self.answering, *self._queue):
            if request is not None:
                self._gateway.buffered -= request.held
        self._reading = self.answering = None
        self._queue.clear()
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.abandon()
        if self.task is not None:
            self.task.cancel()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        self._progress = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            if not isinstance(cause, Refusal):
                raise
            self._refuse(cause)
        except httptools.HttpParserError as error:
            self._refuse(Refusal(400, "InvalidRequest", f"malformed HTTP: {error}", "request", "HTTP/1.1"))
        if self._progress or self._reading is None:
            self._unproductive = 0
        elif not self._deaf:
            self._unproductive += len(data)
            if self._unproductive > self._gateway.config.max_head:
                self._refuse(self._head_too_long())

    def pause_writing(self) -> None:
        self._paused = True
        if self.exchange is not None:
            self.exchange.hold()
        self._expect_next()

    def resume_writing(self) -> None:
        self._paused = False
        if self.exchange is not None:
            self.exchange.unhold()
        self._expect_next()
        if self.answering is None and self._queue:
            self._answer(self._queue.popleft())

    # httptools calls these.

    def on_message_begin(self) -> None:
        self._reading = Request()
        self._in_head = True
        self._size = 0
        if self._free:
            self.deadline = self._gateway.clock + self._gateway.config.head_timeout

    def on_url(self, url: bytes) -> None:
        assert self._reading is not None
        self._reading.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        request = self._reading
        if not self._in_head or request is None:
            return  # a trailer
        name = name.lower()
        kind = _SPECIAL.get(name)
        if kind is None:
            request.head.append(b"%b: %b\r\n" % (name, value))
        elif kind == _LENGTH:
            request.length = int(value)
        elif kind == _TRAJECTORY:
            request.trajectory = _once(request.trajectory, name, value)
        elif kind == _TASK:
            request.task = _once(request.task, name, value)
        elif kind == _REQUEST_ID:
            request.request_id = _once(request.request_id, name, value)
        elif kind == _AUTHORIZATION:
            request.authorization = _once(request.authorization, name, value, limit=8192)
        elif kind == _EXPECT:
            request.expect = value.lower()
        elif kind == _CONNECTION:
            request.connection += b"," + value.lower()
        elif kind == _ORIGIN:
            request.origin = value

    def on_headers_complete(self) -> None:
        request = self._reading
        assert request is not None
        config = self._gateway.config
        self._in_head = False
        request.method = self._parser.get_method()
        if len(request.url) + sum(map(len, request.head)) > config.max_head:
            raise self._head_too_long()
        if self._parser.get_http_version() != "1.1":
            raise Refusal(505, "InvalidRequest", "this is not HTTP/1.1", "request", "HTTP/1.1")
        if self._parser.should_upgrade():  # the parser reads no body then
            raise Refusal(400, "InvalidRequest", "connections cannot be upgraded", "upgrade", "absent")
        if request.connection:
            _obey_connection(request)
        self._gateway.admit(self, request)
        if request.length:  # no room for those who may not come in
            self._hold(request, request.length)
        if self._free:
            self.deadline = self._gateway.clock + config.body_timeout
            if request.expect == b"100-continue":
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        request = self._reading
        assert request is not None
        self._progress = True
        self._size += len(data)
        if self._size > request.held:  # chunks, which announce no length
            self._hold(request, self._size)
        pieces = self._pieces
        if not pieces or len(pieces[-1]) >= _SMALL_PIECE:
            pieces.append(data)
        else:
            last = pieces[-1]
            if isinstance(last, bytes):
                last = pieces[-1] = bytearray(last)
            last += data

    def on_message_complete(self) -> None:
        request, self._reading = self._reading, None
        assert request is not None
        self._progress = True
        request.body = b"".join(self._pieces)
        self._pieces.clear()
        if not self._parser.should_keep_alive():
            self._close_after = True
        if self._free:
            self._answer(request)
        elif len(self._queue) < _PIPELINED:
            self._queue.append(request)
        else:
            self._gateway.buffered -= request.held
            raise Refusal(400, "InvalidRequest", "too many requests sent ahead", "request", f"{_PIPELINED} ahead")

    # Requests, one after the other.

    def _answer(self, request: Request) -> None:
        self.answering = request
        self.deadline = self._answer_by = self._gateway.clock + self._gateway.config.request_timeout
        try:
            self._gateway.handle(self, request)
        except Refusal as error:
            self.respond(self._gateway.refused(error))

    def respond(self, response: Response) -> None:
        """Write a whole answer of the gateway's own."""
        if self.answering is not None:
            self.transport.write(response.encode(close=self.closes, bare=self.answering.method == b"HEAD"))
            self.finished()

    def finished(self) -> None:
        """The answer has been written; the next request may begin."""
        assert self.answering is not None
        self._gateway.buffered -= self.answering.held
        self.answering = self.exchange = self.task = None
        if self.closes and not self._queue:
            self._deaf = True
            self.deadline = self._gateway.clock + self._gateway.config.stall_timeout
            self.transport.close()
        elif self._queue and not self._paused:
            self._answer(self._queue.popleft())
        else:
            self._expect_next()

    def turn_away(self, error: Refusal) -> None:
        """Refuse the connection itself."""
        self._refuse(error)

    def drain(self) -> None:
        """Close once what is under way has been answered."""
        if self.answering is None and self._reading is None and not self._queue:
            self._deaf = True
            self.transport.close()

    def truncate(self) -> None:
        """Close in the middle of an answer, so that nobody takes it for a whole one."""
        self._deaf = True
        self.exchange = None
        self.deadline = self._gateway.clock + _LINGER
        self.transport.close()

    def expired(self) -> None:
        """The deadline has passed."""
        if self.exchange is not None:
            self.exchange.expire()
        elif self._reading is not None and not self._deaf:
            self._refuse(Refusal(408, "Timeout", "the request did not arrive in time", "request", "sent at once"))
        else:
            self.transport.abort()

    @property
    def closes(self) -> bool:
        return self._close_after or self._gateway.draining

    @property
    def _free(self) -> bool:
        """Whether the next request is answered at once."""
        return self.answering is None and not self._paused

    def _expect_next(self) -> None:
        config = self._gateway.config
        answer_by, wait = (_NEVER, config.idle_timeout) if self.answering is None else (self._answer_by, _NEVER)
        self.deadline = min(answer_by, self._gateway.clock + (config.stall_timeout if self._paused else wait))

    def _hold(self, request: Request, size: int) -> None:
        """Reserve room for a body of this size."""
        gateway = self._gateway
        if size > gateway.config.max_body:
            limit = f"at most {gateway.config.max_body} bytes"
            raise Refusal(413, "InvalidRequest", f"the body has {size} bytes or more", "body", limit)
        more = size - request.held
        if gateway.buffered + more > gateway.config.max_buffered:
            limit = f"at most {gateway.config.max_buffered} bytes held at one time"
            raise Refusal(503, "Overloaded", "the gateway holds too many bodies; try again", "body", limit)
        gateway.buffered += more
        request.held = size

    def _refuse(self, error: Refusal) -> None:
        """Answer what cannot be read any further, and listen no more."""
        self._deaf = self._close_after = True
        if self.answering is None and not self._queue:  # else it would look like the answer to what came before
            self.transport.write(self._gateway.refused(error).encode(close=True))
            self.transport.write_eof()
            self.deadline = self._gateway.clock + _LINGER

    def _head_too_long(self) -> Refusal:
        limit = f"at most {self._gateway.config.max_head} bytes"
        return Refusal(431, "InvalidRequest", "the headers are too long", "headers", limit)


def _once(before: bytes, name: bytes, value: bytes, limit: int = 256) -> bytes:
    """A header that may come once, in printable ASCII."""
    if before or len(value) > limit or not value.isascii():
        text = f"once, in at most {limit} ASCII characters"
        raise Refusal(
            400, "InvalidRequest", f"{name.decode()} is repeated, too long or not ASCII", name.decode(), text
        )
    return value


def _obey_connection(request: Request) -> None:
    """Headers that `connection` names are for this hop only."""
    named = {token.strip() for token in request.connection.split(b",")} - {b"", b"close", b"keep-alive"}
    if named:
        request.head = [line for line in request.head if line.partition(b":")[0] not in named]
