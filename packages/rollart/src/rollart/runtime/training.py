"""A training from start to end: parts brought up, the run, its report, everything taken down again.

Invariant: `run.json` always says how the run stands: running, finished, interrupted, or failed with the reason
(tests/integration/test_integration_manners.py).
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import AsyncExitStack
from datetime import UTC, datetime

import msgspec

from rollart.config import Config
from rollart.distributed.errors import in_words
from rollart.errors import unwritable
from rollart.observe.dashboard import Dashboard
from rollart.observe.runinfo import RunInfo, Status, read_run, write_run
from rollart.report import write_report
from rollart.runtime.beside import beside, unless
from rollart.runtime.folder import RunFolder
from rollart.runtime.garbage import rarely_searched
from rollart.runtime.interrupt import interruptible
from rollart.runtime.launch import launch
from rollart.runtime.memory import MemoryWatch
from rollart.runtime.run import Run
from rollart.runtime.setting import Setting, prepare_model

log = logging.getLogger(__name__)


async def train(config: Config, folder: RunFolder, dashboard: Dashboard, *, resume: bool) -> RunInfo:
    """Train in a folder that was created or reopened; returns how it ended. Raises what ended it early."""
    memory = MemoryWatch()
    info = _begun(config, folder, resume=resume)
    write_run(folder.path, info)
    clock = asyncio.get_running_loop().time
    start, before = clock(), info.wall_s or 0.0

    def end(status: Status, reason: str = "") -> RunInfo:
        ended = msgspec.structs.replace(
            info,
            status=status,
            reason=reason,
            ended=datetime.now(UTC),
            wall_s=before + clock() - start,
            peak_memory_bytes=max(memory.peak, info.peak_memory_bytes or 0) or None,
        )
        write_run(folder.path, ended)
        try:
            write_report([folder.path])
        except Exception:  # what was trained counts, and so does what ended it: a report can be made again
            log.exception("the report could not be written; try rollart report %s", folder.path)
        return ended

    try:
        with interruptible(dashboard.log) as stop:
            finished = await beside(_train(config, folder, dashboard, stop, resume=resume), memory.run())
    except BaseException as error:
        told = unwritable(error, folder.path) or error
        try:
            end("failed", f"{type(told).__name__}: {in_words(told)}")
        except OSError:  # what ended the run is what its owner must hear of
            log.exception("run.json could not be written")
        if told is error:
            raise
        raise told from error
    if finished:
        return end("finished")
    resumable = folder.checkpoints.latest() is not None
    return end(
        "interrupted", "asked to stop; resume with --resume" if resumable else "asked to stop before a checkpoint"
    )


async def _train(
    config: Config, folder: RunFolder, dashboard: Dashboard, stop: asyncio.Event, *, resume: bool
) -> bool:
    state, place = None, None
    if resume:
        place = folder.checkpoints.latest()
        assert place is not None, "RunFolder.reopen has looked"
        state = folder.checkpoints.read(place)
        folder.checkpoints.check_buffer(place, state)
        dashboard.log(f"resuming after iteration {state.step}")
    model = await asyncio.to_thread(prepare_model, config, folder.path)
    setting = await asyncio.to_thread(Setting, config, model)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(setting.close)
        starting = stack.enter_async_context(launch(config, folder, setting, place, dashboard.log))
        parts = await unless(stop, starting)
        if parts is None:
            return False
        with rarely_searched():
            return await Run(config, folder, setting, parts, dashboard, state).go(stop)


def _begun(config: Config, folder: RunFolder, *, resume: bool) -> RunInfo:
    earlier = read_run(folder.path) if resume else None
    return RunInfo(
        name=config.run.name,
        status="running",
        mode=config.run.mode,
        seed=config.run.seed,
        iterations=config.run.iterations,
        alpha=config.buffer.alpha,
        parity_limit=config.weights.parity_limit,
        started=earlier.started if earlier else datetime.now(UTC),
        wall_s=earlier.wall_s if earlier else None,
        cores=len(os.sched_getaffinity(0)),
        peak_memory_bytes=earlier.peak_memory_bytes if earlier else None,
    )
