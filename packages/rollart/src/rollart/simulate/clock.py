"""An event loop whose time jumps to the next event.

It has no sockets, threads or processes: work for an executor is done on the spot and takes no time. Timers of one
instant fire in the order in which they were set, so a run is a function of its inputs. With a random `order`, what is
ready at one instant runs in any, and a search finds what should not depend on it but does. When nothing is left to
happen it raises instead of waiting for ever (tests/rollart/test_rollart_simulate_clock.py).
"""

from __future__ import annotations

import asyncio
import heapq
from asyncio.events import Handle, TimerHandle
from collections import deque
from collections.abc import Callable
from contextvars import Context
from random import Random
from typing import Any

from rollart.simulate.errors import Stalled

# Most timers are deadlines that are not reached. Cancelled ones are swept when they are half of a heap this long.
_SWEEP_FROM = 1024


class VirtualLoop(asyncio.BaseEventLoop):
    """Time starts at 0 and is in seconds."""

    _ready: deque[Handle]
    _stopping: bool

    def __init__(self, order: Random | None = None) -> None:
        super().__init__()
        self._order = order
        self._now = 0.0
        self._timers: list[tuple[float, int, TimerHandle]] = []
        self._set = 0
        self._cancelled = 0

    def time(self) -> float:
        return self._now

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> TimerHandle:
        timer = TimerHandle(when, callback, args, self, context)
        self._set += 1
        heapq.heappush(self._timers, (when, self._set, timer))
        return timer

    async def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> Any:
        return func(*args)

    def _timer_handle_cancelled(self, handle: TimerHandle) -> None:
        self._cancelled += 1
        if self._cancelled > _SWEEP_FROM and 2 * self._cancelled > len(self._timers):
            self._timers = [timer for timer in self._timers if not timer[2].cancelled()]
            heapq.heapify(self._timers)
            self._cancelled = 0

    def _run_once(self) -> None:
        """Run what is ready; when nothing is, what is due next."""
        ready = self._ready
        if not ready and not self._stopping:
            self._advance()
        if self._order is not None:
            self._order.shuffle(ready)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def _advance(self) -> None:
        timers = self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
            self._cancelled = max(0, self._cancelled - 1)
        if not timers:
            raise Stalled("nothing is left to happen: everything waits for something else")
        self._now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= self._now:
            self._ready.append(heapq.heappop(timers)[2])

    def _write_to_self(self) -> None:
        """Nothing sleeps here that would have to be woken."""

    def _process_events(self, event_list: list[Any]) -> None:
        """There are no files to watch."""
