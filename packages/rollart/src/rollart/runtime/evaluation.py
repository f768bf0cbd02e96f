"""The success rate of a checkpoint, measured outside of any training."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from rollart.config import Config
from rollart.observe.trace import Trace
from rollart.runtime.beside import beside
from rollart.runtime.control import Control
from rollart.runtime.folder import RunFolder
from rollart.runtime.launch import launch
from rollart.runtime.parts import Parts
from rollart.runtime.setting import Setting, prepare_model


class Measured(msgspec.Struct, frozen=True):
    """The success rate after `step` iterations, of all held-out episodes and of each task's."""

    step: int
    version: int
    success: float
    by_task: dict[str, float]


async def success_of(config: Config, folder: RunFolder, tell: Callable[[str], None]) -> Measured:
    """Serve the last checkpoint of `folder` and play the held-out tasks. Raises what a part raises."""
    place = folder.checkpoints.latest()
    assert place is not None, "RunFolder.hold has looked"
    state = folder.checkpoints.read(place)
    setting = Setting(config, prepare_model(config, folder.path))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(setting.close)
        parts = await stack.enter_async_context(launch(config, folder, setting, place, tell))
        return await beside(_measured(config, setting, parts, state.step), parts.watch())


async def _measured(config: Config, setting: Setting, parts: Parts, step: int) -> Measured:
    async with AsyncExitStack() as stack:
        nowhere = stack.enter_context(TemporaryDirectory())
        trace = stack.enter_context(closing(Trace(Path(nowhere) / "trace.json", asyncio.get_running_loop().time)))
        control = Control(config, setting, parts, trace, None, 0)
        stack.push_async_callback(control.close)
        version = parts.trainer.version
        await control.controller.commit(version)
        success = await control.evaluator.success()
        return Measured(step, version, success, control.evaluator.by_task)
