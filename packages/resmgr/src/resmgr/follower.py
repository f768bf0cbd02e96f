"""What every backend has: pools that it keeps in step with something outside, and a task that follows that.

Invariant (tests: `test_resmgr_follower.py`): an outage of the store, however long, does not end the following.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from resmgr.errors import StoreUnavailable
from resmgr.manager import ResourceManager
from resmgr.values import Pool

log = logging.getLogger("resmgr")
_PAUSE_S = 1.0


class Follower:
    """`start` the task, `stop` it; `register` a pool whenever it may have changed."""

    def __init__(self, manager: ResourceManager) -> None:
        self._manager = manager
        self._registered: dict[str, Pool] = {}
        self._task: asyncio.Task[None] | None = None

    async def register(self, pool: Pool) -> None:
        """What no longer fits a changed pool is lost, and granted again elsewhere."""
        while self._registered.get(pool.name) != pool:
            try:
                await self._manager.register(pool, replace=True)
            except StoreUnavailable as error:
                if asyncio.current_task() is not self._task:
                    raise  # a caller waits, and can be told
                log.warning("pool %s waits for the store: %s", pool.name, error)
                await asyncio.sleep(_PAUSE_S)
            else:
                self._registered[pool.name] = pool

    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._task = asyncio.create_task(work, name=name)
        self._task.add_done_callback(_tell)

    async def stop(self) -> None:
        """Raises what the task failed with, if it did."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            (outcome,) = await asyncio.gather(task, return_exceptions=True)
            if isinstance(outcome, Exception):
                raise outcome


def _tell(task: asyncio.Task[None]) -> None:
    """Whoever entered the backend hears of the failure only when leaving it."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s ended, its pools are no longer followed", task.get_name(), exc_info=error)
