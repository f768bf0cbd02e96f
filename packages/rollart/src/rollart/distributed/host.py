"""What runs in a worker's process: the Ray actor around the user's Worker.

Invariants (tests/rollart/test_rollart_distributed_cluster.py):
- plain methods never block the event loop of a worker that has async ones (test_plain_methods_run_in_one_thread), and
  a worker without any is an actor without an event loop, for that costs a call a quarter of its time;
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

# The concurrency group of a plain worker's watch.
WATCHING = "watching"
OWN = "call_"


class Identity(msgspec.Struct, frozen=True):
    """A worker that has been set up."""

    pid: int
    layout: Layout


class Host:
    """Makes the worker, sets it up, calls its methods: async ones on the loop, plain ones in a thread beside it."""

    def __init__(self, worker_cls: type[Worker], info: WorkerInfo, init: Mapping[str, Any], log: str | None) -> None:
        self._worker = _made(worker_cls, info, log)
        self._init = dict(init)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=info.name)
        marks = marked_methods(worker_cls).values()
        self._serverless = {m.serverless.attr: _function(m.serverless.url) for m in marks if m.serverless}
        for attr, function in self._serverless.items():
            setattr(self._worker, attr, function)
        self._under_way = 0
        self._idle = asyncio.Event()

    async def setup(self) -> Identity:
        """Make the worker and set it up."""
        with _keeping_garbage():
            await self._run(partial(self._worker.__init__, **self._init))  # type: ignore[misc]
            await self._run(self._worker.setup)
        return Identity(os.getpid(), self._worker.layout)

    async def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
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
            result = await asyncio.get_running_loop().run_in_executor(self._thread, _in_this_process, function)
            return await result if inspect.isawaitable(result) else result
        except BaseException as error:
            raise _told(error, self._worker.info) from None


class PlainHost:
    """The host of a worker that has plain methods only: they are called one after the other, in one thread."""

    def __init__(self, worker_cls: type[Worker], info: WorkerInfo, init: Mapping[str, Any], log: str | None) -> None:
        self._worker = _made(worker_cls, info, log)
        self._init = dict(init)
        self._loop: asyncio.AbstractEventLoop | None = None

    def setup(self) -> Identity:
        """Make the worker and set it up."""
        with _keeping_garbage():
            self._run(partial(self._worker.__init__, **self._init))  # type: ignore[misc]
            self._run(self._worker.setup)
        return Identity(os.getpid(), self._worker.layout)

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        return self._run(partial(getattr(self._worker, method), *args, **kwargs))

    def watch(self) -> None:
        """Never returns; called in a thread of its own."""
        threading.Event().wait()

    def drain(self) -> None:
        """Its turn comes when the calls before it have ended."""

    def close(self) -> None:
        self._run(self._worker.close)
        sys.stdout.flush()

    def _run(self, function: Callable[[], Any]) -> Any:
        """What a plain function gives may be awaitable, too."""
        try:
            result = _in_this_process(function)
            return self._awaited(result) if inspect.isawaitable(result) else result
        except BaseException as error:
            raise _told(error, self._worker.info) from None

    def _awaited(self, result: Awaitable[Any]) -> Any:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(_itself(result))


def is_plain(worker_cls: type[Worker]) -> bool:
    """Whether nothing of a worker is async."""
    marks = marked_methods(worker_cls)
    is_async = any(inspect.iscoroutinefunction(getattr(worker_cls, name)) for name in [*marks, "setup", "close"])
    return not is_async and not any(m.serverless for m in marks.values())


def host_of(worker_cls: type[Worker]) -> type[Host] | type[PlainHost]:
    """The host of a class. Decorated methods are methods of the actor, too: a name that travels as one more argument
    would cost a tenth of each call.
    """
    if is_plain(worker_cls):
        plain = {own(name): _serving_plain(name) for name in marked_methods(worker_cls)}
        return type(worker_cls.__name__, (PlainHost,), plain)
    methods = {}
    for name in marked_methods(worker_cls):
        methods[own(name)] = _serving(name, not inspect.iscoroutinefunction(getattr(worker_cls, name)))
    return type(worker_cls.__name__, (Host,), methods)


def actor_of(worker_cls: type[Worker], concurrency: int) -> Any:
    """The Ray actor class of a worker's host; at most so many of its calls are there at once."""
    import ray

    if is_plain(worker_cls):
        # In order, Ray waits for the number of a call that was cancelled before it left, and gives up after 30 s.
        options = {"concurrency_groups": {WATCHING: 1}, "allow_out_of_order_execution": True}
        return ray.remote(**options)(host_of(worker_cls))
    return ray.remote(max_concurrency=concurrency)(host_of(worker_cls))


def watch(worker_cls: type[Worker], handle: Any) -> Any:
    """The reference of a call that ends with the process only: its failure tells of the process's death, without
    anybody having to ask.
    """
    return handle.watch.options(concurrency_group=WATCHING if is_plain(worker_cls) else None).remote()


def own(name: str) -> str:
    """What the actor calls a method, so that none of its own has the name."""
    return OWN + name


def _serving(name: str, threaded: bool) -> Callable[..., Any]:
    async def beside(self: Host, *args: Any, **kwargs: Any) -> Any:
        return await self.call(name, *args, **kwargs)

    async def direct(self: Host, *args: Any, **kwargs: Any) -> Any:
        own = os.getpid()
        with self.counted():
            try:
                result = getattr(self._worker, name)(*args, **kwargs)
                return await result if inspect.isawaitable(result) else result
            except BaseException as error:
                raise _told(error, self._worker.info) from None
            finally:
                _only_in(own)

    return beside if threaded else direct


def _serving_plain(name: str) -> Callable[..., Any]:
    def call(self: PlainHost, *args: Any, **kwargs: Any) -> Any:
        own = os.getpid()
        try:
            result = getattr(self._worker, name)(*args, **kwargs)
            return self._awaited(result) if inspect.isawaitable(result) else result
        except BaseException as error:
            raise _told(error, self._worker.info) from None
        finally:
            _only_in(own)

    return call


def _in_this_process(function: Callable[[], Any]) -> Any:
    own = os.getpid()
    try:
        return function()
    finally:
        _only_in(own)


def _only_in(process: int) -> None:
    """A child that a method forked, and that came back from it, ends here: its parent gives the answer."""
    if os.getpid() != process:
        os._exit(0)


def _told(error: BaseException, who: WorkerInfo) -> BaseException:
    """What is raised in place of an error: the cancellation of the call itself and the end of the process pass, all
    else travels as an error of the method, a cancellation from within it too.
    """
    if isinstance(error, SystemExit):
        return error
    if isinstance(error, asyncio.CancelledError) and _is_cancelled():
        return error
    return carried(error, who.name)


def _is_cancelled() -> bool:
    """Whether this call is; plain workers have no tasks, and their calls cannot be."""
    if asyncio._get_running_loop() is None:
        return False
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _made(worker_cls: type[Worker], info: WorkerInfo, log: str | None) -> Worker:
    """The worker, which has yet to be initialized, in a process whose output goes to `log`."""
    if log is not None:
        _redirect_output(Path(log))
    worker = worker_cls.__new__(worker_cls)
    worker.info = info
    return worker


@contextlib.contextmanager
def _keeping_garbage() -> Iterator[None]:
    """Nearly all that imports make is kept; searching it for garbage takes a fifth of their time."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


async def _itself(result: Awaitable[Any]) -> Any:
    return await result


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
