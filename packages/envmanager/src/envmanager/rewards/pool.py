"""A reward function in processes of its own, for scoring that computes, hangs or crashes.

Invariant: at most `processes` run; a call that is cancelled, outlives its deadline or loses its process costs
that process, and the next call gets another
(test_envmanager_subprocess.py::test_pool_reward_replaces_what_hangs_or_dies).
"""

import asyncio
import itertools
import os
from typing import Any, Self

import msgspec

from envmanager.backends.pool import ProcessPool
from envmanager.contract import check_score
from envmanager.values import Trajectory


class PoolReward:
    """Calls the function named `module:function` with each trajectory. `options` are those of `ProcessPool`.
    Linux only. Use it as an async context, or close it.
    """

    def __init__(self, target: str, *, processes: int | None = None, **options: Any) -> None:
        self._pool = ProcessPool(target, **options)
        self._free = asyncio.Semaphore(processes or os.cpu_count() or 1)
        self._calls = itertools.count(1)

    async def __call__(self, trajectory: Trajectory) -> float:
        async with self._free:
            process = await self._pool.take()
            try:
                return check_score(await process.ask(next(self._calls), "score", msgspec.msgpack.encode(trajectory)))
            finally:
                await self._pool.give_back(process)

    async def close(self) -> None:
        await self._pool.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
