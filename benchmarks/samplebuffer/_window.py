"""Wall time and CPU time of a window of work of a process and its children. Runs in every peer's environment."""

from __future__ import annotations

import json
import time

import psutil


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
