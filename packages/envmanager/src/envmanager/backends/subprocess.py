"""Environments in processes of their own: a crash, a leak or an endless loop costs one episode, and nothing else.

Invariant: a process serves one episode at a time, and another only after a clean close with nothing left behind
(test_envmanager_subprocess.py::test_a_process_is_used_again_only_when_clean).
"""

import itertools
from typing import Any, Self

from envmanager.backends.pool import PoolStats, ProcessPool
from envmanager.backends.process import Process


class SubprocessBackend:
    """A factory of environments by name (`gymnasium:FrozenLake-v1`, `module:factory`), each in a process. Linux
    only.

    With `reuse` a process goes on to the next episode after a clean close, which saves its start. `options` are
    those of `ProcessPool`: memory_bytes (a bound on the data of each process), starting, environ, sandbox, python
    (another interpreter, for libraries that cannot live beside this one's). Use it as an async context, or close it.
    """

    blocking = False

    def __init__(self, target: str, *, reuse: bool = True, **options: Any) -> None:
        self._pool = ProcessPool(target, **options)
        self._reuse = reuse
        self._incarnations = itertools.count(1)

    def __call__(self, key: str) -> "SubprocessEnv":
        return SubprocessEnv(self._pool, key, next(self._incarnations), self._reuse)

    def stats(self) -> PoolStats:
        return self._pool.stats

    async def close(self) -> None:
        await self._pool.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class SubprocessEnv:
    """One episode's environment in a process."""

    def __init__(self, pool: ProcessPool, key: str, incarnation: int, reuse: bool) -> None:
        self._pool = pool
        self._key = key
        self._incarnation = incarnation
        self._reuse = reuse
        self._process: Process | None = None
        self.task = "default"

    async def reset(self, seed: int | None = None) -> Any:
        process = self._process = await self._pool.take()
        self.task = str(await process.ask(self._incarnation, "make", self._key))
        return await process.ask(self._incarnation, "reset", seed)

    async def step(self, action: str) -> Any:
        assert self._process is not None
        return await self._process.ask(self._incarnation, "step", action)

    async def close(self) -> None:
        """Closes where that can still be asked, then gives the process back."""
        process, self._process = self._process, None
        if process is None:
            return
        clean = False
        try:
            if process.fit:
                clean = bool(await process.ask(self._incarnation, "close", None))
        finally:
            await self._pool.give_back(process, clean and self._reuse)
