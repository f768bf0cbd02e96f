"""Processes that serve one caller at a time, each forked when none is idle.

Invariants:
- a process that was given up, failed on the wire, or was not given back as fit is ended with its whole tree
  (test_envmanager_subprocess.py::test_children_go_with_their_environment);
- at most `starting` processes start at once, so that a wave of resets does not time out of its own weight;
- after `close` no process is alive.
"""

import asyncio
import os
import sys
from collections.abc import Mapping

import msgspec

from envmanager.backends.forks import Forks
from envmanager.backends.process import Process
from envmanager.backends.sandbox import bubblewrap
from envmanager.checks import check_count
from envmanager.errors import InfrastructureError


class PoolStats(msgspec.Struct):
    """Processes `started` and `ended`, and takers that found one waiting (`reused`)."""

    started: int = 0
    ended: int = 0
    reused: int = 0


class ProcessPool:
    """Processes that have all loaded one target; each in a bubblewrap of its own with `sandbox`. They run this
    Python, or another `python` that has envmanager and what the target needs.
    """

    def __init__(
        self,
        target: str,
        *,
        memory_bytes: int | None = None,
        starting: int | None = None,
        environ: Mapping[str, str] | None = None,
        sandbox: bool = False,
        python: str = "",
    ) -> None:
        if sys.platform != "linux":
            raise InfrastructureError(f"processes of environments need Linux; on {sys.platform} run them in process")
        if memory_bytes is not None:
            check_count("memory_bytes", memory_bytes, 64 << 20)  # Python itself needs them
        if not isinstance(target, str):
            raise ValueError(f"target is {target!r:.100}; name it: module:factory, or gymnasium:ID")
        if sandbox:
            bubblewrap()
        self.stats = PoolStats()
        self._target = target
        self._forks = Forks(target, memory_bytes or 0, environ or {}, sandbox, python)
        self._starting = asyncio.Semaphore(starting or os.cpu_count() or 1)
        self._idle: list[Process] = []
        self._alive: set[Process] = set()

    async def take(self) -> Process:
        """One that is idle and alive, or a new one. It must be given back."""
        while self._idle:
            process = self._idle.pop()
            if not process.ended:
                self.stats.reused += 1
                return process
            await self._end(process)
        async with self._starting:
            await self._forks.ready()
            process = Process()
            self._alive.add(process)
            self.stats.started += 1
            try:
                await process.start(self._forks.fork)
                await process.ask(0, "load", self._target)
            except BaseException:
                await self._end(process)
                raise
            return process

    async def give_back(self, process: Process, again: bool = True) -> None:
        """Keeps it for the next taker where it is fit and may serve `again`, else ends it."""
        if process.fit and again:
            self._idle.append(process)
        else:
            await self._end(process)

    async def close(self) -> None:
        """Ends every process, also those in use."""
        self._idle.clear()
        await asyncio.gather(*(self._end(process) for process in list(self._alive)))
        await self._forks.close()

    async def _end(self, process: Process) -> None:
        process.kill()
        await process.gone()
        if process in self._alive:
            self._alive.remove(process)
            self.stats.ended += 1
