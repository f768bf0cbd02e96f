"""Environments in processes of their own: a crash, a leak or an endless loop costs one episode, and nothing else.

Invariants:
- an environment that was given up or failed takes its whole process tree with it before its slot is free
  (test_envmanager_subprocess.py::test_children_go_with_their_environment);
- a process serves one episode at a time, and another only after a clean close
  (test_envmanager_subprocess.py::test_a_process_is_used_again_only_when_clean);
- at most `starting` processes start at once, so that a wave of resets does not time out of its own weight;
- after `close` no process is alive.
"""

import asyncio
import itertools
import os
import sys
from collections.abc import Mapping
from typing import Any, Self

import msgspec

from envmanager.backends.process import Process
from envmanager.errors import InfrastructureError


class SubprocessStats(msgspec.Struct):
    """Processes `started` and `ended`, and episodes that found one waiting (`reused`)."""

    started: int = 0
    ended: int = 0
    reused: int = 0


class SubprocessBackend:
    """A factory of environments by name (`gymnasium:FrozenLake-v1`, `module:factory`), each in a process. Linux
    only.

    `memory_bytes` bounds the data of each process. With `reuse` a process goes on to the next episode after a
    clean close, which saves its start. Use it as an async context, or close it.
    """

    blocking = False

    def __init__(
        self,
        target: str,
        *,
        memory_bytes: int | None = None,
        reuse: bool = True,
        starting: int | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        if sys.platform != "linux":
            raise InfrastructureError(
                f"the subprocess backend needs Linux; on {sys.platform} run environments in process"
            )
        if memory_bytes is not None and memory_bytes < 64 << 20:
            raise ValueError(f"memory_bytes is {memory_bytes}; Python itself needs 64 MiB")
        self._target = target
        self._memory = memory_bytes
        self._reuse = reuse
        self._environ = environ
        self._starting = asyncio.Semaphore(starting or os.cpu_count() or 1)
        self._incarnations = itertools.count(1)
        self._idle: list[Process] = []
        self._alive: set[Process] = set()
        self._stats = SubprocessStats()

    def __call__(self, key: str) -> "SubprocessEnv":
        return SubprocessEnv(self, key, next(self._incarnations))

    def stats(self) -> SubprocessStats:
        return self._stats

    async def open(self, incarnation: int, key: str) -> tuple[Process, str]:
        """A process that has made the environment, and the environment's task."""
        if self._idle:
            self._stats.reused += 1
            return await self._make(self._idle.pop(), incarnation, key)
        async with self._starting:
            process = Process(self._target, self._memory, self._environ)
            self._alive.add(process)
            self._stats.started += 1
            return await self._make(process, incarnation, key)

    async def give_back(self, process: Process, clean: bool) -> None:
        if clean and self._reuse:
            self._idle.append(process)
        else:
            await self.end(process)

    async def end(self, process: Process) -> None:
        process.kill()
        await process.gone()
        if process in self._alive:
            self._alive.remove(process)
            self._stats.ended += 1

    async def close(self) -> None:
        """Ends every process, also those in use."""
        self._idle.clear()
        await asyncio.gather(*(self.end(process) for process in list(self._alive)))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _make(self, process: Process, incarnation: int, key: str) -> tuple[Process, str]:
        try:
            await process.start()
            return process, str(await process.ask(incarnation, "make", key))
        except BaseException:
            await self.end(process)
            raise


class SubprocessEnv:
    """One episode's environment in a process."""

    def __init__(self, backend: SubprocessBackend, key: str, incarnation: int) -> None:
        self._backend = backend
        self._key = key
        self._incarnation = incarnation
        self._process: Process | None = None
        self.task = "default"

    async def reset(self, seed: int | None = None) -> Any:
        self._process, self.task = await self._backend.open(self._incarnation, self._key)
        return await self._process.ask(self._incarnation, "reset", seed)

    async def step(self, action: str) -> Any:
        assert self._process is not None
        return await self._process.ask(self._incarnation, "step", action)

    async def close(self) -> None:
        """Closes where that can still be asked, then hands the process back or ends it."""
        process = self._process
        if process is None:
            return
        clean = False
        try:
            if process.fit:
                clean = bool(await process.ask(self._incarnation, "close", None))
        finally:
            self._process = None
            await self._backend.give_back(process, clean)
