"""One run: iterations over given parts, until it is done or asked to stop.

Invariants (tests/integration/test_integration_pipeline.py): whatever ends first, an iteration, the rollout or a
part, ends the run with its own error; a run that is asked to stop finishes its step, writes a checkpoint and leaves
no task behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from math import ceil
from pathlib import Path
from typing import Any

import msgspec

from rollart.config import Config
from rollart.distributed.errors import RemoteError
from rollart.errors import CannotWrite
from rollart.observe.dashboard import Dashboard, snapshot
from rollart.observe.metrics import MetricsWriter
from rollart.observe.runinfo import read_run
from rollart.observe.trace import Trace
from rollart.observe.wandb import WandbRun
from rollart.pipeline.iteration import Iteration
from rollart.pipeline.row import metrics_row
from rollart.runtime.beside import beside, unless
from rollart.runtime.checkpoint import RunState
from rollart.runtime.control import Control
from rollart.runtime.folder import RunFolder
from rollart.runtime.parts import Parts
from rollart.runtime.setting import Setting
from rollart.runtime.starving import longest_episode, starving

# A resource's spans in one iteration: every turn of a small task.
_TRACED_SPANS = 2000


class Run:
    """Runs a configuration. `state` is that of the checkpoint to go on from, or None."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        setting: Setting,
        parts: Parts,
        dashboard: Dashboard,
        state: RunState | None = None,
    ) -> None:
        self.step = state.step if state else 0
        self.success: float | None = None
        """The latest evaluation's success rate."""
        self._config = config
        self._folder = folder
        self._parts = parts
        self._dashboard = dashboard
        self._clock = asyncio.get_running_loop().time
        self._began = self._clock() - (state.elapsed_s if state else 0.0)
        self._saved_step = self.step
        self._cpu_before: Mapping[str, float] = {}
        self._serving = asyncio.Event()
        self._trace = Trace(folder.path / "trace.json", self._clock, limit=_TRACED_SPANS)
        self._metrics = MetricsWriter(folder.path, resume_step=self.step if state else None)
        self._wandb = _wandb(config, folder)
        served = state.trainer_version if state else 0
        self._control = Control(config, setting, parts, self._trace, state.buffer if state else None, served)

    @property
    def elapsed_s(self) -> float:
        """Seconds of running, those before a resume included."""
        return self._clock() - self._began

    @property
    def finished(self) -> bool:
        """True when nothing is left to do."""
        wanted = self._config.run.stop_at_success
        reached = wanted is not None and self.success is not None and self.success >= wanted
        return reached or self.step >= self._config.run.iterations

    async def go(self, stop: asyncio.Event) -> bool:
        """Iterate to the end; False when `stop` was set before it. Raises what ends the run early."""
        async with AsyncExitStack() as stack:
            stack.callback(self._metrics.close)
            if self._wandb is not None:
                stack.callback(self._wandb.close)
            stack.callback(self._trace.close)
            stack.push_async_callback(self._control.close)
            return await beside(self._iterate(stop), self._rollout(), self._starving(), self._parts.watch())

    async def _rollout(self) -> None:
        """Plays trajectories, once the weights that the run starts from are served."""
        await self._serving.wait()
        await self._control.scheduler.run()

    async def _starving(self) -> None:
        """Raises when all that is played fails."""
        await self._serving.wait()
        await starving(self._control.buffer.stats, self._config.buffer.batch_groups, longest_episode(self._config))

    async def _iterate(self, stop: asyncio.Event) -> bool:
        before = await unless(stop, self._begin())
        self._serving.set()
        while not self.finished and not stop.is_set():
            iteration = await self._iteration(stop)
            if iteration is None:
                break
            with self._control.controller.part("record"):
                self._record(iteration, before)
            before = None
            if self.step % self._config.checkpoint.every == 0:
                with self._control.controller.part("checkpoint"):
                    await self._save()
        await self._save()
        if self.finished and self._parts.export is not None:
            await self._export(self._parts.export, self._folder.path / "model-final")
        return self.finished

    async def _export(self, export: Callable[[Path], Coroutine[Any, Any, None]], place: Path) -> None:
        """Write the final model. Raises CannotWrite where the trainer cannot; that it died passes through."""
        try:
            await export(place)
        except RemoteError as error:
            raise CannotWrite(place, error.line) from error

    async def _begin(self) -> float | None:
        """Serve the weights that the run starts from; measure them if nothing was trained yet."""
        controller = self._control.controller
        success = None
        if self.step:
            await controller.commit(self._parts.trainer.version)
        else:
            self._dashboard.log(f"playing {self._config.eval.episodes} held-out episodes before training")
            success = self.success = await self._control.evaluator.success()
            self._dashboard.log(f"before training: success {success:.3f} on held-out tasks")
        controller.restart_clock()
        self._cpu_spent()
        return success

    async def _iteration(self, stop: asyncio.Event) -> Iteration | None:
        """The next iteration; None when the run is asked to stop while it waits for a batch."""
        step = self.step + 1
        last = step == self._config.run.iterations
        due = last or step % self._config.eval.every == 0
        controller = self._control.controller
        work = controller.iteration(step, evaluate=due, last=last)
        return await unless(stop, work, may_cancel=lambda: controller.waiting)

    def _record(self, iteration: Iteration, success_before: float | None) -> None:
        """Write what an iteration did, and show it."""
        self.step = iteration.step
        control, time = self._control, iteration.time
        row = metrics_row(
            iteration,
            control.buffer.stats(),
            elapsed_s=self.elapsed_s,
            tokens=control.meter.take_tokens(),
            cpu=self._cpu_spent(),
        )
        if success_before is not None:
            row["eval/success_before"] = success_before
        if iteration.success is not None:
            self.success = iteration.success
            if len(self._config.tasks) > 1:
                row |= {f"eval/success/{task}": rate for task, rate in control.evaluator.by_task.items()}
        row = self._metrics.write(row)
        if self._wandb is not None:
            self._wandb.write(row)
        self._trace.count("staleness", mean=float(row["staleness/mean"] or 0), max=float(row["staleness/max"] or 0))
        self._trace.flush(iteration.step, time.start, time.end, version=iteration.trained.version)
        self._dashboard.update(
            snapshot(
                row,
                run=self._config.run.name,
                steps=self._config.run.iterations,
                bound=ceil(self._config.buffer.alpha),
                success=self.success,
            )
        )

    def _cpu_spent(self) -> dict[str, float]:
        """CPU seconds of each role since the last call."""
        before, self._cpu_before = self._cpu_before, self._parts.cpu() if self._parts.cpu else {}
        return {role: total - before.get(role, 0.0) for role, total in self._cpu_before.items()}

    async def _save(self) -> None:
        """Write a checkpoint of the last finished step, unless it is there already."""
        if self.step == self._saved_step:
            return
        state = RunState(
            step=self.step,
            trainer_version=self._parts.trainer.version,
            elapsed_s=self.elapsed_s,
            buffer=self._control.saved_buffer(),
        )
        await self._folder.checkpoints.write(state, self._parts.trainer.save)
        self._saved_step = self.step


def _wandb(config: Config, folder: RunFolder) -> WandbRun | None:
    if not config.run.wandb:
        return None
    info = read_run(folder.path)
    started = info.started if info else None
    return WandbRun(config.run.wandb, config.run.name, folder.path, msgspec.to_builtins(config), started=started)
