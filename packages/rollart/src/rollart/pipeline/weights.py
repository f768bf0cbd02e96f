"""The weight path of one version: trainer to store, store to workers, in the background.

Three costs are always measured apart: push (trainer to store), accumulated pull (store to the slowest worker's
host, while rollout goes on) and exposed pull (what rollout waits for; the controller measures that).
Invariant: one version is under way at a time, and `staged` returns it once it lies on every worker, or raises
what stopped it (tests/rollart/test_rollart_controller.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from rollart.observe.trace import Trace
from rollart.pipeline.ports import Puller, Push, Trainer


class Staged(msgspec.Struct, frozen=True):
    """A version that every worker can commit at once."""

    version: int
    digest: str
    push_s: float
    pull_s: float
    nbytes: int


class WeightPath:
    """Owns the task that carries the newest version to the workers."""

    def __init__(self, trainer: Trainer, workers: Sequence[Puller], trace: Trace) -> None:
        self._trainer = trainer
        self._workers = workers
        self._trace = trace
        self._task: asyncio.Task[Staged] | None = None

    @property
    def under_way(self) -> bool:
        """True when a version was sent and not yet taken by `staged`."""
        return self._task is not None

    def send(self, version: int) -> None:
        """Start carrying `version`. The trainer must not change its weights before `staged` returns."""
        assert self._task is None, "a version is under way already"
        self._task = asyncio.create_task(self._carry(version), name=f"weights-{version}")

    async def staged(self) -> Staged:
        """The version that was sent, once it lies on every worker."""
        assert self._task is not None, "no version was sent"
        staged = await self._task
        self._task = None
        return staged

    async def close(self) -> None:
        """Give up what is under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _carry(self, version: int) -> Staged:
        with self._trace.measure("push", f"push {version}"):
            push: Push = await self._trainer.publish(version)
        pulls = await asyncio.gather(*(self._pull(worker, version) for worker in self._workers))
        return Staged(version, push.digest, push.seconds, max(pulls, default=0.0), push.nbytes)

    async def _pull(self, worker: Puller, version: int) -> float:
        clock = asyncio.get_running_loop().time
        start = clock()
        await worker.prefetch(version)
        end = clock()
        self._trace.span("pull", f"pull {version}", start, end, worker=worker.id)
        return end - start
