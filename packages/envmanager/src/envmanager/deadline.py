"""A deadline on something awaited, with an error of our own.

Nearly all deadlines are not reached. So those of one length share one timer, which looks at the oldest when that is
due: a deadline costs an entry in a dict, where a timer of its own costs as much as the rest of a turn.

Invariants:
- a TimeoutError of the work itself is never taken for the deadline's
  (test_envmanager_manager.py::test_every_failure_is_typed_and_says_where);
- a cancellation from outside stays one, also where a deadline has passed as well, and no deadline is heard of after
  its work (test_envmanager_deadline.py).
"""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from envmanager.errors import DeadlineExceeded

T = TypeVar("T")


class _Deadline:
    """One that is waited under: whose, when, and whether it has passed."""

    __slots__ = ("cancelling", "passed", "task", "when")

    def __init__(self, task: asyncio.Task[Any], when: float) -> None:
        self.task = task
        self.when = when
        self.cancelling = task.cancelling()
        self.passed = False


class _Timer:
    """The deadlines of one length on one loop, in the order in which they began, which is that in which they end."""

    def __init__(self) -> None:
        self.running: dict[_Deadline, None] = {}
        self.set = False

    def begin(self, seconds: float) -> _Deadline:
        task = asyncio.current_task()
        assert task is not None, "a deadline is for what a task awaits"
        deadline = _Deadline(task, asyncio.get_running_loop().time() + seconds)
        self.running[deadline] = None
        if not self.set:
            self._set(deadline.when)
        return deadline

    def end(self, deadline: _Deadline) -> bool:
        """The work is over; whether it was the deadline that cancelled it, and nothing else."""
        if not deadline.passed:
            del self.running[deadline]
            return False
        return deadline.task.uncancel() <= deadline.cancelling

    def _set(self, when: float) -> None:
        self.set = True
        asyncio.get_running_loop().call_at(when, self._look, when)

    def _look(self, now: float) -> None:
        self.set = False
        while self.running:
            deadline = next(iter(self.running))
            if deadline.when > now:
                self._set(deadline.when)
                return
            deadline.passed = True
            del self.running[deadline]
            deadline.task.cancel()


_timers: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[float, _Timer]] = WeakKeyDictionary()


async def within(what: str, seconds: float | None, work: Awaitable[T]) -> T:
    """The work's result, or DeadlineExceeded with the work cancelled."""
    if seconds is None:
        return await work
    timers = _timers.setdefault(asyncio.get_running_loop(), {})
    timer = timers.get(seconds) or timers.setdefault(seconds, _Timer())
    deadline = timer.begin(seconds)
    try:
        result = await work
    except BaseException as error:
        if timer.end(deadline) and isinstance(error, asyncio.CancelledError):
            raise DeadlineExceeded(f"{what} took longer than {seconds} s") from error
        raise
    timer.end(deadline)
    return result
