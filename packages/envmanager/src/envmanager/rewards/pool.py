"""A reward function in processes of its own, for scoring that computes, hangs or crashes.

Invariants: at most `processes` run; a call that fails on the wire, is cancelled or outlives its deadline costs
its process, and the next call gets a new one
(test_envmanager_subprocess.py::test_pool_reward_replaces_what_hangs_or_dies).
"""

import asyncio
import itertools
import os
from typing import Self

import msgspec

from envmanager.backends.process import Process
from envmanager.contract import check_score
from envmanager.values import Trajectory


class PoolReward:
    """Calls the function named `module:function` with each trajectory. Linux only. Use it as an async context, or
    close it.
    """

    def __init__(self, target: str, *, processes: int | None = None, memory_bytes: int | None = None) -> None:
        self._target = target
        self._memory = memory_bytes
        self._free = asyncio.Semaphore(processes or os.cpu_count() or 1)
        self._calls = itertools.count(1)
        self._idle: list[Process] = []
        self._alive: set[Process] = set()

    async def __call__(self, trajectory: Trajectory) -> float:
        async with self._free:
            process = self._idle.pop() if self._idle else Process(self._target, self._memory)
            self._alive.add(process)
            try:
                await process.start()
                return check_score(await process.ask(next(self._calls), "score", msgspec.msgpack.encode(trajectory)))
            finally:
                if process.fit:
                    self._idle.append(process)
                else:
                    await self._end(process)

    async def close(self) -> None:
        self._idle.clear()
        await asyncio.gather(*(self._end(process) for process in list(self._alive)))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _end(self, process: Process) -> None:
        process.kill()
        await process.gone()
        self._alive.discard(process)
