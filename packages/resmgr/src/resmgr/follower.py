"""What every backend has: pools that it keeps in step with something outside, and a task that follows that."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from resmgr.manager import ResourceManager
from resmgr.values import Pool


class Follower:
    """`start` the task, `stop` it; `register` a pool whenever it may have changed."""

    def __init__(self, manager: ResourceManager) -> None:
        self._manager = manager
        self._registered: dict[str, Pool] = {}
        self._task: asyncio.Task[None] | None = None

    async def register(self, pool: Pool) -> None:
        """What no longer fits a changed pool is lost, and granted again elsewhere."""
        if self._registered.get(pool.name) != pool:
            await self._manager.register(pool, replace=True)
            self._registered[pool.name] = pool

    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._task = asyncio.create_task(work, name=name)

    async def stop(self) -> None:
        """Raises what the task failed with, if it did."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            (outcome,) = await asyncio.gather(task, return_exceptions=True)
            if isinstance(outcome, Exception):
                raise outcome
