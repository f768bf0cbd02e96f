"""The weight path of one version: trainer to store, store to workers, in the background.

Three costs are always measured apart: push (trainer to store), accumulated pull (store to the slowest worker's
host, while rollout goes on) and exposed pull (what rollout waits for; the controller measures that).
Invariant: one version is under way at a time, and `staged` returns it once it lies on every worker that can take it,
or raises what stopped it (tests/rollart/test_rollart_controller.py). A worker that is lost pulls when it is back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import msgspec

from llmproxy.errors import WorkerLost
from rollart.errors import WeightsDiffer
from rollart.observe.trace import Trace
from rollart.pipeline.ports import Ack, Puller, Push, Trainer

log = logging.getLogger(__name__)

# A process takes tens of seconds to come back; its calls fail at once until then.
_RETRY_S = 1.0


class Staged(msgspec.Struct, frozen=True):
    """A version that can be committed at once."""

    version: int
    digest: str
    push_s: float
    pull_s: float
    nbytes: int
    ranks: tuple[int, ...] = ()
    """Bytes that each rank of the trainer published."""

    def check(self, acks: Sequence[Ack]) -> None:
        """Raises WeightsDiffer when a worker loaded other bytes. One that failed has no digest; the gateway keeps
        traffic from it until it proves the version."""
        wrong = {ack.worker: ack.digest for ack in acks if not ack.error and ack.digest != self.digest}
        if wrong:
            raise WeightsDiffer(
                f"version {self.version} was published with digest {self.digest}, but was loaded as {wrong}"
            )


class WeightPath:
    """Owns the task that carries the newest version to the workers."""

    def __init__(
        self, trainer: Trainer, workers: Sequence[Puller], trace: Trace, *, patience_s: float = 300.0
    ) -> None:
        """`patience_s`: how long to wait for a first worker when all are lost."""
        self._patience_s = patience_s
        self._trainer = trainer
        self._workers = workers
        self._trace = trace
        self._task: asyncio.Task[Staged] | None = None

    @property
    def under_way(self) -> bool:
        """True when a version was sent and not yet taken by `staged`."""
        return self._task is not None

    def send(self, version: int) -> None:
        """Start carrying `version`. The trainer may train on: it publishes what it held when it was asked."""
        assert self._task is None, "a version is under way already"
        self._task = asyncio.create_task(self._carry(version), name=f"weights-{version}")

    async def staged(self) -> Staged:
        """The version that was sent, once it lies on every worker."""
        assert self._task is not None, "no version was sent"
        staged = await self._task
        self._task = None
        return staged

    async def soon(self, seconds: float) -> bool:
        """Whether what is under way has arrived, or failed, within so many seconds from now."""
        assert self._task is not None, "no version was sent"
        await asyncio.wait((self._task,), timeout=seconds)
        return self._task.done()

    async def close(self) -> None:
        """Give up what is under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _carry(self, version: int) -> Staged:
        with self._trace.measure("push", f"push {version}"):
            push: Push = await self._trainer.publish(version)
        pulls = await self._pulls(version)
        return Staged(version, push.digest, push.seconds, max(pulls), push.nbytes, push.ranks)

    async def _pulls(self, version: int) -> list[float]:
        """Seconds of each pull that did not fail: who failed may pull when it is to load, and serves nobody before.
        When all are lost, waits for one that comes back.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._patience_s
        while True:
            results = await asyncio.gather(
                *(self._pull(worker, version) for worker in self._workers), return_exceptions=True
            )
            pulls = [result for result in results if isinstance(result, float)]
            ends = zip(self._workers, results, strict=True)
            failed = [(worker.id, end) for worker, end in ends if isinstance(end, BaseException)]
            if pulls or not failed:
                for name, error in failed:
                    log.warning("version %d is not staged on %s: %s", version, name, error)
                return pulls or [0.0]
            for name, error in failed:
                if not isinstance(error, WorkerLost) or clock() >= deadline:
                    log.error("version %d could not be staged on %s", version, name)
                    raise error
            await asyncio.sleep(_RETRY_S)

    async def _pull(self, worker: Puller, version: int) -> float:
        clock = asyncio.get_running_loop().time
        start = clock()
        await worker.prefetch(version)
        end = clock()
        self._trace.span("pull", f"pull {version}", start, end, worker=worker.id)
        return end - start
