"""The memory of a run: the largest sum over the driver and everything it started.

It adds resident sizes, so pages that processes share count once for each: an upper bound.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import psutil

_EVERY_S = 2.0


class MemoryWatch:
    """Samples while `run` is awaited; `peak` is the largest sum of bytes so far."""

    def __init__(self) -> None:
        self.peak = 0

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            self.peak = max(self.peak, await asyncio.to_thread(tree_bytes))
            await asyncio.sleep(_EVERY_S)


def tree_bytes() -> int:
    """Resident bytes of this process and its descendants."""
    me = psutil.Process()
    total = 0
    for process in (me, *me.children(recursive=True)):
        with suppress(psutil.Error):
            total += process.memory_info().rss
    return total
