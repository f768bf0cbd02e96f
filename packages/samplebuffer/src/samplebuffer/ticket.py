"""One trajectory to run, as its producer sees it.

Invariant: a ticket ends once. Whatever its producer says later is answered, never raised, and changes nothing
(tests/samplebuffer/test_samplebuffer_core.py, "late").
"""

from __future__ import annotations

from collections.abc import Callable
from math import nan
from typing import TYPE_CHECKING, Any, Literal

from samplebuffer.values import Answer, Reason

if TYPE_CHECKING:
    from samplebuffer.core import Core

State = Literal["running", "finished", "returned", "surplus", "stale", "failed", "closed"]
"""Running; ended by its producer (finished, or returned by fail and cancel); or ended by the buffer for a Reason."""

TEXT = 1000  # characters kept of an error

OnCancel = Callable[[Reason], object]


class Ticket:
    """The right, and the duty, to run one member of one group.

    `id` is unique in a buffer's life, `member` in the group's (a replacement gets a new number). `issued_version`
    is the version served at issue: until `stamp`, the lower bound of the start version.
    """

    __slots__ = (
        "_callbacks",
        "_core",
        "group_id",
        "id",
        "issued_version",
        "key",
        "late",
        "member",
        "start_version",
        "state",
    )

    def __init__(self, core: Core, id: int, key: Any, group_id: int, member: int, issued_version: int) -> None:
        self._core = core
        self._callbacks: list[OnCancel] | None = None
        self.id = id
        self.key = key
        self.group_id = group_id
        self.member = member
        self.issued_version = issued_version
        self.start_version: int | None = None
        self.state: State = "running"
        self.late = False  # whether it was finished after the buffer had ended it

    def __repr__(self) -> str:
        return f"Ticket({self.id}, key={self.key!r}, group {self.group_id}.{self.member}, {self.state})"

    @property
    def bound(self) -> int:
        """The start version, or its lower bound until that is known."""
        return self.issued_version if self.start_version is None else self.start_version

    def on_cancel(self, callback: OnCancel) -> None:
        """Call `callback(reason)` when the buffer ends this ticket; at once if it already did.

        It is called synchronously, after the buffer's state is consistent. What it raises is logged and counted,
        and reaches no other producer.
        """
        if self.state == "running":
            if self._callbacks is None:
                self._callbacks = []
            self._callbacks.append(callback)
        elif self.state != "finished" and self.state != "returned":
            callback(self.state)

    def stamp(self, version: int) -> None:
        """Say, once, which version generated the first token. Ignored when the ticket has ended."""
        self._core.stamp(self, version)

    def finish(self, payload: Any, reward: float) -> Answer:
        """Hand in the trajectory."""
        return self._core.finish(self, payload, reward)

    def fail(self, error: BaseException | str) -> bool:
        """Give the member back as failed; False when the ticket had ended already."""
        return self._core.lose(self, "failed", error)

    def cancel(self) -> bool:
        """Give the member back unfinished; False when the ticket had ended already."""
        return self._core.lose(self, "cancelled", "cancelled by its owner")

    def take_callbacks(self) -> list[OnCancel]:
        """The callbacks to call now that the buffer has ended this ticket; empty from then on."""
        callbacks, self._callbacks = self._callbacks or [], None
        return callbacks


def as_number(reward: Any) -> float:
    """A reward as a float; NaN when it is no number, or none that a float can hold."""
    try:
        return float(reward)
    except (TypeError, ValueError, OverflowError):
        return nan


def as_text(error: BaseException | str) -> str:
    """An error as a text that can be kept and sent, also where asking the error for its text raises."""
    try:
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    except Exception as second:
        text = f"{type(error).__name__} (its text raised {type(second).__name__})"
    return text[:TEXT].encode(errors="replace").decode()
