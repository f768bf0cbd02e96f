"""A ticket held in another process than the buffer: as `samplebuffer.Ticket`, with awaitable answers."""

from __future__ import annotations

import asyncio
import logging
from operator import index
from typing import TYPE_CHECKING, Any

from samplebuffer.ray import wire
from samplebuffer.ticket import OnCancel, as_number, as_text
from samplebuffer.values import Answer, Reason

if TYPE_CHECKING:
    from samplebuffer.ray.client import RayBuffer

log = logging.getLogger("samplebuffer")


class RayTicket:
    """What is said is sent in order, soon and together; awaiting it gives the buffer's answer or its error."""

    __slots__ = ("_buffer", "_callbacks", "_ended", "group_id", "id", "issued_version", "key", "member")

    def __init__(self, buffer: RayBuffer, info: wire.TicketInfo) -> None:
        self._buffer = buffer
        self._callbacks: list[OnCancel] = []
        self._ended: Reason | None = None
        self.id = info.id
        self.key = info.key
        self.group_id = info.group_id
        self.member = info.member
        self.issued_version = info.issued_version

    def __repr__(self) -> str:
        return f"RayTicket({self.id}, key={self.key!r}, group {self.group_id}.{self.member})"

    def on_cancel(self, callback: OnCancel) -> None:
        """Call `callback(reason)` when the buffer ends this ticket; at once if it is known to have."""
        if self._ended is None:
            self._callbacks.append(callback)
        else:
            callback(self._ended)

    def stamp(self, version: int) -> asyncio.Future[None]:
        """Say, once, which version generated the first token."""
        return self._send(wire.Stamp(self.id, index(version)))

    def finish(self, payload: Any, reward: float) -> asyncio.Future[Answer]:
        """Hand in the trajectory."""
        measure = self._buffer.length
        length = index(measure(payload)) if measure and payload is not None else None
        command = wire.Finish(self.id, as_number(reward), length)
        return self._send(command, payload) if self._ended is None else self._send(command)

    def fail(self, error: BaseException | str) -> asyncio.Future[bool]:
        """Give the member back as failed."""
        return self._send(wire.Lose(self.id, True, as_text(error)))

    def cancel(self) -> asyncio.Future[bool]:
        """Give the member back unfinished."""
        return self._send(wire.Lose(self.id, False, "cancelled by its owner"))

    def _send(self, command: wire.Command, *payload: Any) -> asyncio.Future[Any]:
        answer = self._buffer.link().say(command, *payload)
        if not isinstance(command, wire.Stamp):
            answer.add_done_callback(self._answered)
        return answer

    def _answered(self, answer: asyncio.Future[Any]) -> None:
        """Whatever the buffer said, it was the last about this ticket, unless it refused."""
        if answer.cancelled() or answer.exception() is None:  # who cancels the answer is done with it, too
            self._callbacks.clear()
            self._buffer.forget(self)

    def end(self, reason: Reason) -> None:
        """The buffer has ended this ticket."""
        self._ended = reason
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(reason)
            except Exception:  # other tickets' callbacks must be called, too
                log.exception("the cancel callback of %r raised", self)
