"""What runs in a worker's process: the Ray actor around the user's Worker.

Invariants (tests/rollart/test_rollart_distributed_cluster.py):
- plain methods never block the event loop, so that the process goes on answering
  (test_plain_methods_run_in_one_thread);
- everything that the process and its children print is in its own log file (test_death_brings_the_last_log_lines).
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from rollart.distributed.carry import carried
from rollart.distributed.decorators import marked_methods
from rollart.distributed.worker import Layout, Worker, WorkerInfo


class Identity(msgspec.Struct, frozen=True):
    """A worker that has been set up."""

    pid: int
    layout: Layout


class Host:
    """Makes the worker, sets it up, and calls its methods."""

    def __init__(self, worker_cls: type[Worker], info: WorkerInfo, init: Mapping[str, Any], log: str | None) -> None:
        if log is not None:
            _redirect_output(Path(log))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=info.name)
        self._worker = worker_cls.__new__(worker_cls)
        self._worker.info = info
        self._init = dict(init)
        marks = marked_methods(worker_cls).values()
        self._serverless = {m.serverless.attr: _function(m.serverless.url) for m in marks if m.serverless}
        for attr, function in self._serverless.items():
            setattr(self._worker, attr, function)

    async def setup(self) -> Identity:
        """Make the worker and set it up."""
        gc.disable()  # nearly all that imports make is kept; searching it for garbage takes a fifth of their time
        await self._run(partial(self._worker.__init__, **self._init))  # type: ignore[misc]
        await self._run(self._worker.setup)
        gc.freeze()
        gc.enable()
        return Identity(os.getpid(), self._worker.layout)

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await self._run(partial(getattr(self._worker, method), *args, **kwargs))

    async def watch(self) -> None:
        """Never returns: that this call fails is how the driver learns of this process's death."""
        await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        await self._run(self._worker.close)
        for function in self._serverless.values():
            await function.close()
        sys.stdout.flush()

    async def _run(self, function: Callable[[], Any]) -> Any:
        """Call a plain function in the worker's thread, an async one here; what it gives may be awaitable, too."""
        try:
            if inspect.iscoroutinefunction(function):
                return await function()
            result = await asyncio.get_running_loop().run_in_executor(self._thread, function)
            return await result if inspect.isawaitable(result) else result
        except Exception as error:
            raise carried(error) from None


def _function(url: str) -> Any:
    """An awaitable call of the serverless function at `url`."""
    from envmanager.rewards.url import URLReward

    return URLReward(url)


def _redirect_output(log: Path) -> None:
    """Send this process's output, and that of its children, to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
