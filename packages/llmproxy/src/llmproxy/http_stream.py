"""A streamed answer of a generation, taken in event by event.

Invariants (tests/llmproxy/test_llmproxy_http_worker.py): whatever arrived is in `told` at every instant, so that a
generation that is cut short keeps it, and `spans` says which weights made it; `lost` is empty only when the stream
ended with its last event.
"""

from __future__ import annotations

import asyncio

import msgspec

from .dialects import Dialect, Told
from .upstream import Upstream
from .values import Span


class Stream:
    """One streamed answer, taken in as it comes. `done` is set when it ended, one way or the other.

    Servers may tell versions with the last event alone, so the stream notes itself who makes what: `version` at
    first, then what `change` says.
    """

    def __init__(self, dialect: Dialect, wire_id: str, version: int) -> None:
        self.wire_id = wire_id
        self.upstream: Upstream | None = None
        self.told = Told()
        self.status = 0
        self.lost = ""
        self.interrupted = False
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._dialect = dialect
        self._rest = b""
        self._closed = False
        self._version = version
        self._changed: list[Span] = []

    def change(self, version: int) -> None:
        """What comes from now on is made by `version`; the server is paused meanwhile."""
        self._changed = self.spans
        self._version = version

    @property
    def spans(self) -> list[Span]:
        """Of all tokens so far."""
        start, end = self._changed[-1].end if self._changed else 0, len(self.told.token_ids)
        return self._changed + ([Span(self._version, start, end)] if end > start else [])

    def on_head(self, upstream: Upstream) -> None:
        self.status = upstream.status

    def on_body(self, data: bytes) -> None:
        self._rest += data

    def flush(self) -> None:
        if self.status != 200:
            return
        *events, self._rest = self._rest.replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                self._closed = True
            elif data and not event.startswith(b":"):
                try:
                    self._dialect.hear(data, self.told)
                except (msgspec.DecodeError, ValueError) as error:
                    self.told.error = f"an event that this dialect does not know: {error}"

    def on_end(self) -> None:
        self.flush()
        if self.status == 200 and not (self._closed or self.told.error):
            self.lost = "the stream ended without its last event"
        if not self.done.done():
            self.done.set_result(None)

    def on_lost(self, reason: str) -> None:
        if not self.done.done():
            self.lost = reason
            self.done.set_result(None)

    @property
    def refused(self) -> tuple[int, bytes]:
        """The server's 4xx, also one that it found out after the head was sent, and what it said; else (0, b"")."""
        if 400 <= self.status < 500:
            return self.status, self._rest
        error = self.told.error
        code = error.get("code") if isinstance(error, dict) else 0
        return (code, msgspec.json.encode(error)) if isinstance(code, int) and 400 <= code < 500 else (0, b"")

    @property
    def failure(self) -> str:
        """Why the answer is not whole; empty when it is."""
        if self.lost or self.told.error:
            return self.lost or f"told an error: {self.told.error}"
        return "" if self.status == 200 else f"answered {self.status}"
