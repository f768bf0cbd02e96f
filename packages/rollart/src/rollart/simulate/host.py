"""A machine whose cores engines, trainer and driver share, each of them one thread.

While more threads compute than there are cores, each gets an equal part of them. Invariant: what all of them compute
in a second is the smaller of the two numbers (tests/rollart/test_rollart_simulate_host.py).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable


class Host:
    """`turn_s` is what the driver computes for a turn; turns wait in line for it."""

    def __init__(self, cores: int, turn_s: float) -> None:
        self._spent: dict[str, float] = {}
        self._cores = cores
        self._turn_s = turn_s
        self._computing: Counter[str] = Counter()
        self._at = 0.0
        self._told: list[Callable[[], None]] = []
        self._changed = asyncio.Event()
        self._driver = asyncio.Lock()
        self._waiting = 0

    @property
    def slowdown(self) -> float:
        """How many times as long as alone everything takes now."""
        return max(1.0, self._computing.total() / self._cores)

    def tell(self, changed: Callable[[], None]) -> None:
        """From now on call this after each change of the slowdown."""
        self._told.append(changed)

    def enter(self, role: str) -> None:
        """A thread begins to compute."""
        self._change(role, 1)

    def leave(self, role: str) -> None:
        """A thread ends or waits."""
        self._change(role, -1)

    async def compute(self, role: str, seconds: float) -> None:
        """One more thread computes for so many CPU seconds."""
        self.enter(role)
        try:
            await self._progress(seconds)
        finally:
            self.leave(role)

    async def turn(self) -> None:
        """The driver's work on a turn, after that on the turns that came before."""
        self._waiting += 1
        if self._waiting == 1:
            self.enter("driver")
        try:
            async with self._driver:
                await self._progress(self._turn_s)
        finally:
            self._waiting -= 1
            if not self._waiting:
                self.leave("driver")

    def account(self) -> dict[str, float]:
        """CPU seconds by role until now."""
        self._settle()
        return {role: self._spent.get(role, 0.0) for role in ("driver", "engines", "trainer")}

    async def _progress(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        while seconds > 1e-9:
            start, slowdown, changed = loop.time(), self.slowdown, self._changed
            try:
                async with asyncio.timeout(seconds * slowdown):
                    await changed.wait()
            except TimeoutError:
                return
            seconds -= (loop.time() - start) / slowdown

    def _change(self, role: str, threads: int) -> None:
        self._settle()
        before = self.slowdown
        self._computing[role] += threads
        if self.slowdown != before:
            self._changed.set()
            self._changed = asyncio.Event()
            for changed in self._told:
                changed()

    def _settle(self) -> None:
        now = asyncio.get_running_loop().time()
        for role, threads in self._computing.items():
            self._spent[role] = self._spent.get(role, 0.0) + threads * (now - self._at) / self.slowdown
        self._at = now
