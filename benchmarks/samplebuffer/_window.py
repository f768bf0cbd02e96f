"""What every runner shares, in every peer's environment: the payloads, and the wall and CPU time of a window of work
of a process and its children."""

from __future__ import annotations

import json
import os
import time
from functools import cache

import psutil


@cache
def payloads(size: int, n: int) -> list[bytes]:
    """Random payloads. Made once, in the round that warms up, so that no measured window holds their making."""
    return [os.urandom(size) for _ in range(n)]


def _cpu() -> dict[int, float]:
    me = psutil.Process()
    spent = {}
    for process in [me, *me.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.Error:  # it ended just now
            continue
        spent[process.pid] = times.user + times.system
    return spent


class Window:
    """From its making to `close`."""

    def __init__(self) -> None:
        self._cpu = _cpu()
        self._begun = time.perf_counter()

    def close(self) -> str:
        """The line that answers a job."""
        seconds = time.perf_counter() - self._begun
        spent = sum(used - self._cpu.get(pid, 0.0) for pid, used in _cpu().items())
        return json.dumps({"seconds": seconds, "cpu": spent})
