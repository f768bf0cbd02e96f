"""The six-step pipeline. One iteration, mode `rollart`:

    1 get_batch   whole groups within the bound, oldest first
    2 suspend     no generation is admitted; running ones are interrupted and keep their tokens
    3 update      every worker commits the version trained in the previous iteration; stale trajectories end
    4 resume      only workers that acknowledged the version receive traffic
    5 recompute   engines rebuild the caches of interrupted generations under the new weights, and these go on
    6 train_step  on the batch of step 1, in parallel with the resumed rollout; its weights are published in the
                  background and committed by the next iteration's step 3

Modes without overlap do 1, 2, 6, then 3, 4, so that generation always holds the trainer's own version. What else
a mode may choose stands in `modes.py`. Where the weights are still on their way when the batch is there, step 6
begins, and 2 to 5 follow beside it once they are staged (a *late* switch): nobody waits for a slow link.

The loop consumes batches and trained versions. It waits for the buffer (step 1), for the staged version (step 2)
and for the trainer (step 6). Rollout unblocks the first, the weight path the second, the trainer the third; each
raises a typed error instead of waiting for ever.

Invariants (tests/rollart/test_rollart_controller.py): the served version advances only after every worker that
will get traffic acknowledged the digest that was published; the steps happen in this order; the parts of an
iteration sum to its wall time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from rollart.errors import ParityError
from rollart.observe.steptime import StepClock
from rollart.observe.trace import Trace
from rollart.pipeline.iteration import Iteration, Switch
from rollart.pipeline.modes import Mode
from rollart.pipeline.ports import Buffer, Gateway, Probe, Trained, Trainer
from rollart.pipeline.weights import WeightPath

Evaluate = Callable[[], Coroutine[Any, Any, float]]
# Weights are waited for as long as this, so that fast links keep the plain order.
_SOON_S = 1.0
# The parity probe needs weights that a late switch finds changed: after so many without it, one waits.
_UNPROVEN = 9


class Controller:
    """Runs iterations. Everything it drives is handed to it; it owns the order and the served version."""

    def __init__(
        self,
        *,
        mode: Mode,
        buffer: Buffer,
        gateway: Gateway,
        trainer: Trainer,
        weights: WeightPath,
        probe: Probe,
        evaluate: Evaluate,
        trace: Trace,
        served: int = 0,
        parity_limit: float | None = 1e-3,
    ) -> None:
        self.served = served
        self._mode = mode
        self._buffer = buffer
        self._gateway = gateway
        self._trainer = trainer
        self._weights = weights
        self._probe = probe
        self._evaluate = evaluate
        self._trace = trace
        self._parity_limit = parity_limit
        self._time = asyncio.get_running_loop().time
        self._clock = StepClock(self._time)
        self._waiting = False
        self._unproven = 0

    async def iteration(self, step: int, *, evaluate: bool = False, last: bool = False) -> Iteration:
        """One iteration; `last` commits its own weights too, so that the run ends serving what it trained."""
        with self._step("get_batch"):
            batch = await self._get_batch()
        switch: Switch | None = None
        if self._mode.overlap:
            late = None
            if self._weights.under_way:
                if evaluate or await self._in_time():
                    switch = await self._switch()
                else:
                    late = self._switch_late()
            elif self._mode.hold:
                self._buffer.advance(self.served)
            trained, success = await self._train_beside(batch, step, evaluate and not last, late)
            switch = late.result() if late else switch
            if last:
                switch = await self._switch()
        else:
            with self._step("suspend"):
                await self._gateway.suspend()
            trained, success = await self._train_beside(batch, step, False)
            switch = await self._switch(suspended=True)
        if success is None and evaluate:
            with self._step("eval"):
                success = await self._evaluate()
        return Iteration(step, batch, self.served, trained, switch, success, self._clock.lap())

    async def commit(self, version: int) -> Switch:
        """Serve the trainer's `version` before the first iteration: how a resumed run begins."""
        self._weights.send(version)
        return await self._switch()

    @property
    def waiting(self) -> bool:
        """True while the iteration waits for its batch, where cancelling it loses nothing."""
        return self._waiting

    def restart_clock(self) -> None:
        """Begin the next iteration's time now: what passed since the last one belongs to none."""
        self._clock.lap()

    async def _get_batch(self) -> Any:
        self._waiting = True
        try:
            return await self._buffer.get_batch(
                trainer_version=self._trainer.version,
                cancel_spares=self._mode.hold,
                rest=self._weights.under_way,  # what starts now would be a version older than what starts in a moment
            )
        finally:
            self._waiting = False

    async def _in_time(self) -> bool:
        """Whether the weights under way are to be waited for: they are there, or nearly, or parity is due."""
        with self._step("wait_weights"):
            return self._unproven >= _UNPROVEN or await self._weights.soon(_SOON_S)

    def _switch_late(self) -> asyncio.Task[Switch]:
        if not self._mode.hold:
            self._buffer.wake()
        return asyncio.create_task(self._switch(late=True))

    async def _train_beside(
        self, batch: Any, step: int, evaluate: bool, late: asyncio.Task[Switch] | None = None
    ) -> tuple[Trained, float | None]:
        """Step 6, with a late switch or an evaluation of the served version beside it when one is due."""
        evaluation = asyncio.create_task(self._evaluate()) if evaluate else None
        try:
            with self._step("train", row="train"):
                trained = await self._trainer.train_step(batch, step)
            if late is not None:
                with self._step("wait_weights"):
                    await late
            self._weights.send(trained.version)
            if evaluation is None:
                return trained, None
            with self._step("eval"):
                return trained, await evaluation
        finally:
            for task in (evaluation, late):
                if task is not None:
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)

    async def _switch(self, *, suspended: bool = False, late: bool = False) -> Switch:
        """Steps 2 to 4: commit the version that is under way. A `late` one takes no part of the iteration's time."""
        with self._step("wait_weights", late=late):
            staged = await self._weights.staged()
        start = self._time()
        if not suspended:
            with self._step("suspend", late=late):
                await self._gateway.suspend()
        with self._step("update", row="commit", late=late):
            staged.check(await self._gateway.update(staged.version))
        self.served = staged.version
        ended = len(self._buffer.advance(staged.version))
        with self._step("resume", late=late):
            await self._gateway.resume()
        exposed = self._time() - start
        if late:
            self._unproven += 1
            return Switch(staged, exposed, None, ended)
        with self._step("probe"):
            parity = await self._probe.measure(staged.version)
        if parity is None:
            return Switch(staged, exposed, None, ended)
        self._unproven = 0
        if self._parity_limit is not None and parity > self._parity_limit:
            raise ParityError(
                f"version {staged.version}: engine and trainer differ by {parity:.2e} nats on the same tokens, "
                f"over weights.parity_limit = {self._parity_limit:g}: the engine does not use the trained weights"
            )
        return Switch(staged, exposed, parity, ended)

    def part(self, name: str) -> AbstractContextManager[None]:
        """Time what the driver does between iterations, as a part of the next one."""
        return self._clock.part(name)

    @contextmanager
    def _step(self, part: str, row: str = "controller", *, late: bool = False) -> Iterator[None]:
        """Time one step for the trace and, unless it happens beside another (`late`), for the step clock."""
        with nullcontext() if late else self._clock.part(part), self._trace.measure(row, part):
            yield
