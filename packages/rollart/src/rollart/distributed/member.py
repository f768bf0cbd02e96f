"""One worker's process as the driver sees it: started, watched, restarted, called.

Invariants (tests/rollart/test_rollart_distributed_cluster.py):
- a death is noticed without a call being made: one call that never returns is always under way, and fails with the
  process (test_death_without_calls_is_noticed);
- every call in flight on a dead process fails with the same WorkerDied (test_death_brings_the_last_log_lines);
- `settled` is set exactly when the worker is up, or dead for good: after its restarts on the same resource, and after
  another resource was looked for (tests/rollart/test_rollart_distributed_failover.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rollart.distributed.carry import Carried
from rollart.distributed.decorators import marked_methods
from rollart.distributed.errors import RemoteError, WorkerDied
from rollart.distributed.placement import Seat
from rollart.distributed.session import tail
from rollart.distributed.worker import Layout, Worker, WorkerInfo

# Calls beyond this many at one worker wait at their sender.
_CONCURRENCY = 1000
# Ray's words for it; there is no field.
_NODE_DIED = "node has died"
# With which Ray begins to guess why, or to go into numbers.
_ADVICE = ("There are some potential root causes", "Some common causes include", "OOM kill reason")


class ActorOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a cluster's processes are run. Seconds are those of the driver's loop."""

    cpus: float = 0.05
    """Ray's share of CPUs for one worker; small, so that all of them fit on a small machine."""
    env: Mapping[str, str] = {}
    logs: Path | None = None
    """Folder of the workers' log files, `<name>.log`; without it, Ray's own files have their output."""
    restarts: int = 0
    """How often each worker is started anew, on the same resource, after its process has died."""
    replacements: int = 0
    """How often each worker is started anew on another resource, after its restarts on one are used up."""
    follow_offers: bool = False
    """Whether workers move when the resource manager offers them a better class. Their state does not move along."""
    place: Callable[[WorkerInfo], Mapping[str, Any]] | None = None
    """Further Ray options of a worker's actor, such as those of its binding's placement group."""
    start_timeout: float = 300.0
    stop_timeout: float = 5.0


class Member:
    """Made by a cluster. `death` is None exactly while the worker is up, and says else why it is not; `ended` says
    that it will not be up again.
    """

    def __init__(
        self,
        worker_cls: type[Worker],
        info: WorkerInfo,
        init: Mapping[str, Any],
        options: ActorOptions,
        on_end: Callable[[WorkerDied], None],
        elsewhere: Callable[[Member], Awaitable[Seat | None]] | None = None,
    ) -> None:
        self.info = info
        self.death: WorkerDied | None = WorkerDied(info, "it has not been started", "")
        self.settled = asyncio.Event()
        self.layout = Layout(info.rank, info.world_size)
        self.pid = 0
        self.restarts = 0
        self.ended = False
        self._worker_cls = worker_cls
        self._init = init
        self._options = options
        self._on_end = on_end
        self._elsewhere = elsewhere
        self._replacements = options.replacements if elsewhere else 0
        self._log = options.logs / f"{info.name}.log" if options.logs else None
        self._handle: Any = None
        self._methods: dict[str, Callable[..., Any]] = {}
        self._deaths: dict[str, WorkerDied] = {}
        self._supervisor: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the process and set the worker up; raises WorkerDied when that fails."""
        await self._boot()
        self._watch(booted=True)

    async def stop(self) -> None:
        """Let the worker close, then end its process."""
        await self._unwatch()
        self.ended = True
        try:
            if self.death is None:
                await self._last_call("close")
        finally:
            if self._handle is not None:
                self._die("it was stopped")
            self.settled.set()

    def stay(self, seat: Seat) -> None:
        """The same resource under another binding."""
        self.info = _seated(self.info, seat)

    async def move(self, seat: Seat, drain: bool = False) -> None:
        """Start the worker anew on another resource; `settled` tells when it is up there. With `drain` the calls
        under way may end first, for `stop_timeout` seconds; no further ones are made.
        """
        await self._unwatch()
        self.settled.clear()
        if drain and self.death is None:
            self.death = WorkerDied(self.info, f"it moves to {seat.hardware}", "")
            await self._last_call("drain")
            await self._last_call("close")
        self._die(f"it moves to {seat.hardware} on {seat.node}")
        self.stay(seat)
        self.restarts += 1
        self._watch(booted=False)

    async def give_up(self, reason: str) -> None:
        """End the process for good."""
        await self._unwatch()
        self.fail(self._die(reason))

    def kill(self, reason: str) -> None:
        """End the process, which is looked after as after any other death."""
        self._die(reason)

    def fail(self, death: WorkerDied) -> None:
        """It is not looked after any more: what waits for it hears so."""
        self.ended = True
        if self.death is not None:
            self.settled.set()
        self._on_end(death)

    async def _last_call(self, method: str) -> None:
        try:
            async with asyncio.timeout(self._options.stop_timeout):
                await self.wait(getattr(self._handle, method).remote(), method)
        except (TimeoutError, WorkerDied):
            pass  # it ends now in any case

    def _watch(self, booted: bool) -> None:
        self._supervisor = asyncio.create_task(self._supervise(booted), name=f"watch {self.info.name}")

    async def _unwatch(self) -> None:
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            supervisor.cancel()
            await asyncio.wait([supervisor])

    def check(self) -> None:
        """Raises WorkerDied when the worker is not up."""
        if self.death is not None:
            raise self.death.with_traceback(None)

    def submit(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call the worker; the reference to the result. Raises WorkerDied when it is not up."""
        self.check()
        direct = self._methods.get(method)
        return direct(*args, **kwargs) if direct else self._handle.call.remote(method, *args, **kwargs)

    async def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call the worker and wait for the result."""
        return await self.wait(self.submit(method, *args, **kwargs), method)

    async def wait(self, reference: Any, method: str) -> Any:
        """The result; cancelling the wait cancels the call."""
        import ray

        try:
            return await reference
        except asyncio.CancelledError:
            ray.cancel(reference)
            raise
        except ray.exceptions.RayError as error:
            raise self.translated(error, method, reference) from None

    def translated(self, error: Any, method: str, reference: Any) -> Exception:
        """The typed error for what Ray raised in place of a result."""
        import ray

        if isinstance(
            error, ray.exceptions.RayActorError | ray.exceptions.OutOfMemoryError
        ):  # Ray ends a process for that
            return self._lost(error, reference)
        cause = getattr(error, "cause", None)
        if isinstance(cause, Carried):
            return RemoteError(self.info, method, cause.line, cause.trace, cause.original())
        return RemoteError(self.info, method, f"{type(error).__name__}, on the way to or from it", str(error), cause)

    async def _boot(self) -> None:
        self._handle = self._spawn()
        try:
            async with asyncio.timeout(self._options.start_timeout):
                identity = await self.wait(self._handle.setup.remote(), "setup")
        except RemoteError as error:
            raise self._die(f"setup raised {error.line}") from error
        except TimeoutError as error:
            raise self._die(f"setup took longer than {self._options.start_timeout} s") from error
        self.pid, self.layout, self.death = identity.pid, identity.layout, None
        self.settled.set()

    def _spawn(self) -> Any:
        from rollart.distributed.host import actor_of, own

        name = f"{self.info.name}.{self.restarts}" if self.restarts else self.info.name
        place = self._options.place(self.info) if self._options.place else {}
        common = {"name": name, "runtime_env": {"env_vars": dict(self._options.env)}}
        actor = actor_of(self._worker_cls, _CONCURRENCY).options(
            **{"num_cpus": self._options.cpus, **place, **common}
        )
        handle = actor.remote(self._worker_cls, self.info, self._init, str(self._log) if self._log else None)
        self._methods = {name: getattr(handle, own(name)).remote for name in marked_methods(self._worker_cls)}
        return handle

    async def _supervise(self, booted: bool) -> None:
        """Waits for the process's death; starts it anew while restarts are left, then elsewhere; ends with the last
        death.
        """
        restarts, died = self._options.restarts, self.death
        while True:
            try:
                if not booted:
                    await self._boot()
                died = await self._watched()
            except WorkerDied as error:
                died = error
            booted = False
            if self._elsewhere is not None and _NODE_DIED in died.reason:
                # Its binding is about to be lost, and this task cancelled by the move that follows.
                await asyncio.sleep(self._options.start_timeout)
            self.restarts += 1
            if restarts:
                restarts -= 1
            elif (seat := await self._another()) is not None:
                restarts = self._options.restarts
                self.stay(seat)
            else:
                self.restarts -= 1
                break
        self.ended = True
        self.settled.set()
        self._on_end(died)

    async def _another(self) -> Seat | None:
        if not self._replacements or self._elsewhere is None:
            return None
        self._replacements -= 1
        return await self._elsewhere(self)

    async def _watched(self) -> WorkerDied:
        import ray

        from rollart.distributed.host import watch

        watching = watch(self._worker_cls, self._handle)
        try:
            await watching
        except ray.exceptions.RayError as error:
            return self._lost(error, watching)
        raise AssertionError("a worker's watch returned")

    def _lost(self, error: Any, reference: Any) -> WorkerDied:
        """The death that a failed call tells of; it may be that of an earlier process. Not all errors name that."""
        actor = reference.task_id().actor_id().hex()
        if actor not in self._deaths:
            self._die(_reason(error))
        return self._deaths[actor].with_traceback(None)

    def _die(self, reason: str) -> WorkerDied:
        """Make sure that the present process has ended, and note why."""
        import ray

        ray.kill(self._handle)
        self.settled.clear()
        self.death = WorkerDied(self.info, reason, tail(self._log) if self._log else "")
        self._deaths[self._handle._actor_id.hex()] = self.death
        return self.death


def _seated(info: WorkerInfo, seat: Seat) -> WorkerInfo:
    return msgspec.structs.replace(
        info, hardware=seat.hardware, node=seat.node, binding=seat.binding, fell_back=seat.fell_back
    )


def _reason(error: Exception) -> str:
    """The telling part of Ray's message."""
    text = str(error)
    _, found, detail = text.partition("Worker exit detail:")
    text = detail if found else text
    for advice in _ADVICE:
        text = text.partition(advice)[0]
    return " ".join(text.split())
