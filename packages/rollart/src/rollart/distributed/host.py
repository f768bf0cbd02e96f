"""What runs in a worker's process: the Ray actor around the user's Worker.

Invariants (tests/rollart/test_rollart_distributed_cluster.py):
- plain methods of a worker that has async ones never block the event loop, so that the process goes on answering
  (test_plain_methods_run_in_one_thread);
- everything that the process and its children print is in its own log file (test_death_brings_the_last_log_lines).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
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
    """Makes the worker, sets it up, and calls its methods: async ones on the loop, plain ones in a thread beside it;
    where there are plain ones only, on the loop as well, for nobody waits for it.
    """

    def __init__(self, worker_cls: type[Worker], info: WorkerInfo, init: Mapping[str, Any], log: str | None) -> None:
        if log is not None:
            _redirect_output(Path(log))
        self._worker = worker_cls.__new__(worker_cls)
        self._worker.info = info
        self._init = dict(init)
        self._thread = None if is_plain(worker_cls) else ThreadPoolExecutor(1, thread_name_prefix=info.name)
        marks = marked_methods(worker_cls).values()
        self._serverless = {m.serverless.attr: _function(m.serverless.url) for m in marks if m.serverless}
        for attr, function in self._serverless.items():
            setattr(self._worker, attr, function)
        self._under_way = 0
        self._idle = asyncio.Event()

    async def setup(self) -> Identity:
        """Make the worker and set it up."""
        gc.disable()  # nearly all that imports make is kept; searching it for garbage takes a fifth of their time
        await self._run(partial(self._worker.__init__, **self._init))  # type: ignore[misc]
        await self._run(self._worker.setup)
        gc.freeze()
        gc.enable()
        return Identity(os.getpid(), self._worker.layout)

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        with self.counted():
            return await self._run(partial(getattr(self._worker, method), *args, **kwargs))

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """A call is under way."""
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    async def watch(self) -> None:
        """Never returns: that this call fails is how the driver learns of this process's death."""
        await asyncio.get_running_loop().create_future()

    async def drain(self) -> None:
        """Returns when no call is under way."""
        while self._under_way:
            self._idle.clear()
            await self._idle.wait()

    async def close(self) -> None:
        await self._run(self._worker.close)
        for function in self._serverless.values():
            await function.close()
        sys.stdout.flush()

    async def _run(self, function: Callable[[], Any]) -> Any:
        """What a plain function gives may be awaitable, too."""
        try:
            if inspect.iscoroutinefunction(function):
                return await function()
            if self._thread is None:
                result = function()
            else:
                result = await asyncio.get_running_loop().run_in_executor(self._thread, function)
            return await result if inspect.isawaitable(result) else result
        except Exception as error:
            raise carried(error) from None


def is_plain(worker_cls: type[Worker]) -> bool:
    """Whether nothing of a worker is async."""
    marks = marked_methods(worker_cls)
    is_async = any(inspect.iscoroutinefunction(getattr(worker_cls, name)) for name in [*marks, "setup", "close"])
    return not is_async and not any(m.serverless for m in marks.values())


def host_of(worker_cls: type[Worker]) -> type[Host]:
    """The host of a class. Decorated methods are methods of the actor, too: a name that travels as one more argument
    would cost a tenth of each call.
    """
    plain, methods = is_plain(worker_cls), {}
    for name in marked_methods(worker_cls):
        threaded = not plain and not inspect.iscoroutinefunction(getattr(worker_cls, name))
        methods[own(name)] = _serving(name, threaded)
    return type(worker_cls.__name__, (Host,), methods)


def own(name: str) -> str:
    """What the actor calls a method, so that none of its own has the name."""
    return f"call_{name}"


def _serving(name: str, threaded: bool) -> Callable[..., Any]:
    async def beside(self: Host, *args: Any, **kwargs: Any) -> Any:
        return await self.call(name, *args, **kwargs)

    async def direct(self: Host, *args: Any, **kwargs: Any) -> Any:
        with self.counted():
            try:
                result = getattr(self._worker, name)(*args, **kwargs)
                return await result if inspect.isawaitable(result) else result
            except Exception as error:
                raise carried(error) from None

    return beside if threaded else direct


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
