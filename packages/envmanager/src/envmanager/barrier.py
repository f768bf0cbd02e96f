"""Batch-level rollout, for comparison: each turn waits until every episode of the batch has arrived at it.

Invariant: nobody passes while one of the batch is still stepping
(test_envmanager_barrier.py::test_every_turn_waits_for_the_slowest).
"""

import asyncio


class Barrier:
    """For `size` episodes at a time, which must be no more than run at once, else nobody ever passes."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"size is {size}; a batch has at least 1 episode")
        self.size = size
        self._left = 0
        self._waiting: set[asyncio.Future[None]] = set()

    def join(self) -> None:
        """An episode begins; it takes the place of one that has left."""
        self._left = max(0, self._left - 1)

    def leave(self) -> None:
        """An episode is over, however it ended."""
        self._left += 1
        self._pass()

    async def arrive(self) -> None:
        """Waits for the others."""
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(mine)
        self._pass()
        try:
            await mine
        finally:
            self._waiting.discard(mine)

    def _pass(self) -> None:
        if len(self._waiting) >= self.size - self._left:
            for waiter in self._waiting:
                if not waiter.done():
                    waiter.set_result(None)
            self._waiting.clear()
