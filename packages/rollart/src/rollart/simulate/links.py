"""Links that several transfers share.

Every transfer under way gets an equal part of the capacity, and no more than one stream reaches; all advance alike,
so one counter of bytes orders their ends. Invariants (tests/rollart/test_rollart_simulate_links.py): what arrives a
second never exceeds the capacity, and a transfer alone takes its bytes over the rate of a stream.
"""

from __future__ import annotations

import asyncio
import heapq
from math import inf


class Link:
    """`capacity` bytes a second in all, `stream` for one transfer, whose first byte comes after `latency` seconds."""

    def __init__(self, capacity: float = inf, stream: float = inf, latency: float = 0.0) -> None:
        self._capacity = capacity
        self._stream = stream
        self._latency = latency
        self._factor = 1.0
        self._carried = 0.0  # bytes that a transfer under way since the start would have got
        self._at = 0.0
        self._ends: list[tuple[float, int, asyncio.Future[None]]] = []
        self._serial = 0
        self._timer: asyncio.TimerHandle | None = None

    async def carry(self, nbytes: float) -> None:
        """Return when so many bytes have passed. Cancelling frees the share."""
        if self._latency and nbytes > 0:
            await asyncio.sleep(self._latency)
        if nbytes <= 0 or (self._capacity == inf and self._stream == inf):
            return
        self._advance()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._serial += 1
        heapq.heappush(self._ends, (self._carried + nbytes, self._serial, done))
        self._schedule()
        try:
            await done
        finally:
            if not done.done() or done.cancelled():
                self._advance()
                self._ends = [end for end in self._ends if end[2] is not done]
                heapq.heapify(self._ends)
                self._schedule()

    def throttle(self, factor: float) -> None:
        """From now on only this part of everything."""
        self._advance()
        self._factor = factor
        self._schedule()

    @property
    def _rate(self) -> float:
        return self._factor * min(self._stream, self._capacity / max(1, len(self._ends)))

    def _advance(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._ends:
            self._carried += self._rate * (now - self._at)
        self._at = now

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ends and self._rate:  # nothing arrives while nothing is carried
            wait = max(0.0, self._ends[0][0] - self._carried) / self._rate
            self._timer = asyncio.get_running_loop().call_later(wait, self._tick)

    def _tick(self) -> None:
        self._timer = None
        due = self._ends[0][0]
        self._advance()
        self._carried = max(self._carried, due)
        while self._ends and self._ends[0][0] <= self._carried:
            done = heapq.heappop(self._ends)[2]
            if not done.done():
                done.set_result(None)
        self._schedule()
