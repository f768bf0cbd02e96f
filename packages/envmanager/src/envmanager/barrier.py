"""Batch-level rollout, for comparison: each turn waits until every episode that is going on has arrived at it.

Invariants:
- nobody passes while another is still stepping
  (test_envmanager_barrier.py::test_every_turn_waits_for_the_slowest);
- when the last one that others wait for leaves, they pass: there is no number to get wrong
  (test_envmanager_barrier.py::test_who_leaves_early_holds_nobody_up).
"""

import asyncio


class Barrier:
    """For the episodes of one scheduler, which joins and leaves for them. Those whose tickets are there together
    start together.
    """

    def __init__(self) -> None:
        self._going = 0
        # In order of arrival, so that a run on virtual time is the same each time.
        self._arrived: dict[asyncio.Future[None], None] = {}
        self._over: dict[asyncio.Future[None], None] = {}

    def join(self) -> None:
        """An episode begins."""
        self._going += 1

    def leave(self) -> None:
        """An episode is over, however it ended."""
        self._going -= 1
        self._pass()

    async def arrive(self) -> None:
        """Waits for the others to arrive, or leave."""
        await self._wait(self._arrived)

    async def over(self) -> None:
        """Waits until no episode is going on."""
        await self._wait(self._over)

    async def _wait(self, waiting: dict[asyncio.Future[None], None]) -> None:
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting[mine] = None
        self._pass()
        try:
            await mine
        finally:
            waiting.pop(mine, None)

    def _pass(self) -> None:
        if len(self._arrived) >= self._going:
            _release(self._arrived)
        if not self._going:
            _release(self._over)


def _release(waiting: dict[asyncio.Future[None], None]) -> None:
    for waiter in waiting:
        if not waiter.done():
            waiter.set_result(None)
    waiting.clear()
