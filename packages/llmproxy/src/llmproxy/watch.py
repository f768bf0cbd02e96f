"""Looks after workers that have requests out, so that one that fell silent cannot hold them for ever.

A timer runs only while requests are out; each look probes every worker that has some and is not being probed yet. A
request of a silent worker so waits at most `every` seconds plus what a probe may take
(tests/llmproxy/test_llmproxy_faults.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from .fleet import Slot


class Watch:
    """`check` probes a worker and deals with what it finds."""

    def __init__(
        self, every: float, slots: Callable[[], Iterable[Slot]], check: Callable[[Slot], Coroutine[Any, Any, None]]
    ) -> None:
        self._every = every
        self._slots = slots
        self._check = check
        self._timer: asyncio.TimerHandle | None = None
        self._checks: dict[str, asyncio.Task[None]] = {}

    def arm(self) -> None:
        """Requests went out."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._every, self._look)

    async def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        checks = list(self._checks.values())
        for check in checks:
            check.cancel()
        await asyncio.gather(*checks, return_exceptions=True)

    def _look(self) -> None:
        self._timer = None
        self._checks = {id: check for id, check in self._checks.items() if not check.done()}
        busy = [slot for slot in self._slots() if slot.running and slot.serving]
        for slot in busy:
            if slot.id not in self._checks:
                self._checks[slot.id] = asyncio.create_task(self._check(slot))
        if busy:
            self.arm()
