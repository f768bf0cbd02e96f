"""What runs in a worker's process: the Ray actor around the user's Worker.

Invariants (tests/rollart/test_rollart_distributed_cluster.py):
- plain methods never block the event loop, so that the process goes on answering
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
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
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


class _Hosted:
    """The worker in its process, and what it was made with."""

    def __init__(self, worker_cls: type[Worker], info: WorkerInfo, init: Mapping[str, Any], log: str | None) -> None:
        if log is not None:
            _redirect_output(Path(log))
        self._worker = worker_cls.__new__(worker_cls)
        self._worker.info = info
        self._init = dict(init)


class Host(_Hosted):
    """Calls the methods of a worker that has async ones: these on the loop, plain ones in a thread."""

    def __init__(self, worker_cls: type[Worker], info: WorkerInfo, init: Mapping[str, Any], log: str | None) -> None:
        super().__init__(worker_cls, info, init, log)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=info.name)
        marks = marked_methods(worker_cls).values()
        self._serverless = {m.serverless.attr: _function(m.serverless.url) for m in marks if m.serverless}
        for attr, function in self._serverless.items():
            setattr(self._worker, attr, function)
        self._under_way = 0
        self._idle = asyncio.Event()

    async def setup(self) -> Identity:
        """Make the worker and set it up."""
        _before_imports()
        await self._run(partial(self._worker.__init__, **self._init))  # type: ignore[misc]
        await self._run(self._worker.setup)
        _after_imports()
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
        """Call a plain function in the worker's thread, an async one here; what it gives may be awaitable, too."""
        try:
            if inspect.iscoroutinefunction(function):
                return await function()
            result = await asyncio.get_running_loop().run_in_executor(self._thread, function)
            return await result if inspect.isawaitable(result) else result
        except Exception as error:
            raise carried(error) from None


class PlainHost(_Hosted):
    """Calls the methods of a worker that has plain ones only: on the actor's own thread, without a loop between."""

    def setup(self) -> Identity:
        """Make the worker and set it up."""
        _before_imports()
        _run(partial(self._worker.__init__, **self._init))  # type: ignore[misc]
        _run(self._worker.setup)
        _after_imports()
        return Identity(os.getpid(), self._worker.layout)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return _run(partial(getattr(self._worker, method), *args, **kwargs))

    def watch(self) -> None:
        """Never returns, in a thread of its own: see `Host.watch`."""
        threading.Event().wait()

    def drain(self) -> None:
        """Calls are served one by one, so those before this one have ended."""

    def close(self) -> None:
        _run(self._worker.close)
        sys.stdout.flush()


def is_plain(worker_cls: type[Worker]) -> bool:
    """Whether nothing of a worker is async, so that its calls need no loop, nor a thread beside it."""
    marks = marked_methods(worker_cls)
    is_async = any(inspect.iscoroutinefunction(getattr(worker_cls, name)) for name in [*marks, "setup", "close"])
    return not is_async and not any(m.serverless for m in marks.values())


def host_of(worker_cls: type[Worker]) -> type[Host] | type[PlainHost]:
    """The host of a class. Decorated methods are methods of the actor, too: a name that travels as one more argument
    would cost a tenth of each call.
    """
    base = PlainHost if is_plain(worker_cls) else Host
    methods = {own(name): _serving(name, getattr(worker_cls, name), base) for name in marked_methods(worker_cls)}
    return type(worker_cls.__name__, (base,), methods)


def own(name: str) -> str:
    """What the actor calls a method, so that none of its own has the name."""
    return f"call_{name}"


def _serving(name: str, function: Callable[..., Any], host: type[Host] | type[PlainHost]) -> Callable[..., Any]:
    if host is PlainHost:

        def plain(self: PlainHost, *args: Any, **kwargs: Any) -> Any:
            return self.call(name, *args, **kwargs)

        return plain
    if not inspect.iscoroutinefunction(function):

        async def threaded(self: Host, *args: Any, **kwargs: Any) -> Any:
            return await self.call(name, *args, **kwargs)

        return threaded

    async def direct(self: Host, *args: Any, **kwargs: Any) -> Any:
        with self.counted():
            try:
                return await getattr(self._worker, name)(*args, **kwargs)
            except Exception as error:
                raise carried(error) from None

    return direct


def _run(function: Callable[[], Any]) -> Any:
    try:
        result = function()
        return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result
    except Exception as error:
        raise carried(error) from None


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def _before_imports() -> None:
    gc.disable()  # nearly all that imports make is kept; searching it for garbage takes a fifth of their time


def _after_imports() -> None:
    gc.freeze()
    gc.enable()


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
