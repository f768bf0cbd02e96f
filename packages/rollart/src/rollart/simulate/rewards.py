"""Where trajectories are scored, and how busy that keeps the devices that are paid for.

Invariant: dedicated devices score at most `gpus x together` trajectories at a time, and functions any number
(tests/rollart/test_rollart_simulate_rewards.py).
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Sequence
from typing import Protocol

from rollart.simulate.config import RewardsConfig
from rollart.simulate.engines import Busy


class Rewards(Protocol):
    """Spends the time of scoring."""

    async def score(self, seconds: float) -> None: ...

    def used(self, elapsed: float) -> float | None:
        """The part of the paid time that something was scored in; None where nothing is paid for."""
        ...


class Inline:
    """On the hosts of the environments."""

    async def score(self, seconds: float) -> None:
        if seconds:
            await asyncio.sleep(seconds)

    def used(self, elapsed: float) -> float | None:
        return None


class Dedicated:
    """Devices that stand by; each scores several trajectories at a time, the least busy takes the next."""

    def __init__(self, gpus: int, together: int) -> None:
        self._slots = asyncio.Semaphore(gpus * together)
        self._free = [(0, number) for number in range(gpus)]
        self._busy: Sequence[Busy] = [Busy() for _ in range(gpus)]

    async def score(self, seconds: float) -> None:
        async with self._slots:
            load, number = heapq.heappop(self._free)
            heapq.heappush(self._free, (load + 1, number))
            self._busy[number].enter()
            try:
                await asyncio.sleep(seconds)
            finally:
                self._busy[number].leave()
                self._free = [(load - (one == number), one) for load, one in self._free]
                heapq.heapify(self._free)

    def used(self, elapsed: float) -> float:
        return sum(busy.seconds() for busy in self._busy) / (len(self._busy) * elapsed) if elapsed else 0.0


class Serverless:
    """Instances that come with calls and stay `cold_s` without one; paid for as long as they are there."""

    def __init__(self, call_s: float, cold_s: float) -> None:
        self._call_s = call_s
        self._cold_s = cold_s
        self._idle: list[float] = []  # since when each instance has had nothing to do
        self._scoring = 0.0
        self._paid = 0.0

    async def score(self, seconds: float) -> None:
        clock = asyncio.get_running_loop().time
        now = clock()
        self._expire(now)
        if self._idle:
            self._paid += now - self._idle.pop()
        self._scoring += seconds
        self._paid += seconds
        await asyncio.sleep(seconds)
        self._idle.append(clock())
        await asyncio.sleep(self._call_s)

    def used(self, elapsed: float) -> float:
        self._expire(elapsed)
        return self._scoring / self._paid if self._paid else 0.0

    def _expire(self, now: float) -> None:
        gone = [since for since in self._idle if now - since >= self._cold_s]
        self._paid += self._cold_s * len(gone)
        self._idle = [since for since in self._idle if now - since < self._cold_s]


def make_rewards(config: RewardsConfig) -> Rewards:
    if config.kind == "dedicated":
        return Dedicated(config.gpus, config.together)
    if config.kind == "serverless":
        return Serverless(config.call_s, config.cold_s)
    return Inline()
