"""The CPU seconds of a run by role: the driver's own process, and the processes of each cluster with their children.

Invariant: a total never falls, whatever ends or is started anew (tests/rollart/test_rollart_cpu.py).
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress

import psutil

Pids = Callable[[], Iterable[int]]


class CpuClock:
    """`roles` says for each role which processes of this machine are its own now."""

    def __init__(self, roles: Mapping[str, Pids]) -> None:
        self._roles = roles
        self._seen: dict[tuple[str, int, float], float] = {}
        """The seconds of each process of a role when it was last seen: pids are used again, with another birth."""

    def __call__(self) -> dict[str, float]:
        """Seconds by role since the first process began, as far as processes were seen before they ended."""
        children = _children()
        for role, pids in self._roles.items():
            for pid in _trees(pids(), children):
                with suppress(psutil.Error):
                    process = psutil.Process(pid)
                    times = process.cpu_times()
                    self._seen[role, pid, process.create_time()] = times.user + times.system
        totals = dict.fromkeys(self._roles, 0.0)
        for (role, _, _), seconds in self._seen.items():
            totals[role] += seconds
        return {"driver": time.process_time(), **totals}


def _children() -> dict[int, list[int]]:
    """The children of every process, in one pass over the process table."""
    children: dict[int, list[int]] = defaultdict(list)
    for process in psutil.process_iter(["ppid"]):
        children[process.info["ppid"]].append(process.pid)
    return children


def _trees(roots: Iterable[int], children: Mapping[int, list[int]]) -> Iterator[int]:
    """These processes and their descendants, each once."""
    waiting = [pid for pid in roots if pid not in (0, os.getpid())]
    while waiting:
        pid = waiting.pop()
        yield pid
        waiting += children.get(pid, [])
