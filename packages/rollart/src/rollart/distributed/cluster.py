"""Workers of one class on bound resources, called as one object.

Invariants (tests/rollart/test_rollart_distributed_cluster.py):
- a cluster has all of its workers and bindings, or none of them (test_failed_setup_leaves_nothing);
- `died` is done as soon as a worker is dead for good, whether or not anybody calls it
  (test_death_without_calls_is_noticed).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import re
import socket
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec

from rollart.distributed.call import Call, Part, together
from rollart.distributed.decorators import Marks, marked_methods
from rollart.distributed.dispatch import Args, Plan, dp_dispatch, execute_all, execute_one, tag_of
from rollart.distributed.errors import NoTarget, NotRunning, WorkerDied
from rollart.distributed.failover import Failover, FailoverStats
from rollart.distributed.member import ActorOptions, Member
from rollart.distributed.placement import Resources, Seat, default_requests, fallbacks, seats
from rollart.distributed.unheard import tell_in_a_line
from rollart.distributed.worker import Worker, WorkerInfo


class ClusterStats(msgspec.Struct, frozen=True):
    """Calls made, calls that went to a fallback class, restarts of workers, workers that are up, and what happened to
    the bindings.
    """

    calls: int
    fallbacks: int
    restarts: int
    up: int
    failover: FailoverStats


class Cluster:
    """`size` workers. Those methods of `worker_cls` that carry a decorator are methods of the cluster, which give a
    `Call`: to be awaited, or asked for its `result()`.

    `request` is what to bind, or several of it; without one the resource manager's classes and the methods' affinity
    decide, and without `resources` nothing is bound. Further keyword arguments are those of `worker_cls`.
    """

    def __init__(
        self,
        worker_cls: type[Worker],
        resources: Resources | None = None,
        size: int = 1,
        role: str = "",
        *,
        request: Any = None,
        backend: str = "",
        options: ActorOptions | None = None,
        **init: Any,
    ) -> None:
        if type(size) is not int or size < 1:
            raise ValueError(f"size={size!r} must be a whole number, at least 1")
        self.worker_cls = worker_cls
        self.size = size
        self.role = role or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", worker_cls.__name__).lower()
        self._died: asyncio.Future[WorkerDied] | None = None
        self._resources = resources
        self._requests = list(request) if isinstance(request, Sequence) else [request] if request is not None else []
        self._backend = backend
        self._options = options or ActorOptions()
        self._init = init
        self._members: list[Member] = []
        self._failover: Failover | None = None
        self._fallbacks: dict[str, list[str]] = {}
        self._starting = False
        self._turn = 0
        self._calls = 0
        self._fell_back = 0
        for name, marks in marked_methods(worker_cls).items():
            if hasattr(Cluster, name) or name in self.__dict__:
                raise ValueError(f"{worker_cls.__name__}.{name} has the name of a cluster's own method; rename it")
            setattr(self, name, self._bound(name, marks))

    def __getattr__(self, name: str) -> Callable[..., Call]:
        offered = ", ".join(marked_methods(self.__dict__.get("worker_cls", Worker)))
        raise AttributeError(f"a cluster has no {name!r}; methods with a decorator: {offered or 'none'}")

    @property
    def members(self) -> Sequence[Member]:
        """The workers, by rank; empty when the cluster is not running."""
        return tuple(self._members)

    @property
    def died(self) -> asyncio.Future[WorkerDied]:
        """Ends with the first worker that is dead for good."""
        if self._died is None:
            raise NotRunning(f"the cluster {self.role} has not been started")
        return self._died

    def stats(self) -> ClusterStats:
        restarts = sum(member.restarts for member in self._members)
        up = sum(member.death is None for member in self._members)
        failover = msgspec.structs.replace(self._failover.stats) if self._failover else FailoverStats()
        return ClusterStats(self._calls, self._fell_back, restarts, up, failover)

    async def start(self) -> None:
        """Bind the resources, start the workers and set them up."""
        import ray

        if self._members or self._starting:
            raise NotRunning(f"the cluster {self.role} has been started already")
        if not ray.is_initialized():
            raise NotRunning(f"the cluster {self.role} needs Ray; start a RaySession first")
        tell_in_a_line()
        self._died = asyncio.get_running_loop().create_future()
        self._starting = True
        try:
            placed = await self._bind()
            self._members = [self._member(rank, seat) for rank, seat in enumerate(placed)]
            if self._failover is not None:
                self._failover.watch(self._members)
            await together([member.start() for member in self._members])
        except BaseException:
            await self.stop()
            raise
        finally:
            self._starting = False

    async def stop(self) -> None:
        """Close the workers, end their processes and release the resources."""
        members, self._members = self._members, []
        failover, self._failover = self._failover, None
        try:
            ends = await asyncio.gather(*(member.stop() for member in members), return_exceptions=True)
        finally:
            if failover is not None:
                await failover.close()
        for end in ends:
            if isinstance(end, BaseException):
                raise end

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _bind(self) -> list[Seat]:
        if self._resources is None:
            return [Seat()] * self.size
        asked = self._requests or await default_requests(self._resources, self.worker_cls, self.role, self.size)
        self._failover = Failover(self._resources, self._options)
        bindings = await self._failover.bind(asked)
        self._fallbacks = fallbacks(asked)
        return seats(bindings, self.size)

    def _member(self, rank: int, seat: Seat) -> Member:
        info = WorkerInfo(
            name=f"{self.role}-{rank}",
            role=self.role,
            rank=rank,
            world_size=self.size,
            backend=self._backend,
            hardware=seat.hardware,
            node=seat.node or socket.gethostname(),
            binding=seat.binding,
            fell_back=seat.fell_back,
        )
        elsewhere = self._failover.elsewhere if self._failover else None
        return Member(self.worker_cls, info, self._init, self._options, self._on_end, elsewhere)

    def _on_end(self, died: WorkerDied) -> None:
        if self._died is not None and not self._died.done():
            self._died.set_result(died)

    def _bound(self, name: str, marks: Marks) -> Callable[..., Call]:
        function = getattr(self.worker_cls, name)

        @functools.wraps(function)
        def method(*args: Any, **kwargs: Any) -> Call:
            return self._call(name, marks, (args, kwargs))

        signature = inspect.signature(function)
        own = list(signature.parameters.values())[1:]
        method.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
        return method

    def _call(self, name: str, marks: Marks, args: Args) -> Call:
        if not self._members:
            raise NotRunning(f"the cluster {self.role} is not running; await its start() before calling {name}")
        self._calls += 1
        plan = self._plan(marks, args)
        for rank, _ in plan.calls:  # before any is called
            member = self._members[rank]
            if member.ended or not marks.idempotent:
                member.check()
        return Call([self._part(rank, name, own, marks.idempotent) for rank, own in plan.calls], plan.join)

    def _part(self, rank: int, name: str, args: Args, idempotent: bool) -> Part:
        member = self._members[rank]
        if not idempotent:
            return Part(member, name, member.submit(name, *args[0], **args[1]), None)
        submit = functools.partial(member.submit, name, *args[0], **args[1])
        return Part(member, name, submit() if member.death is None else None, submit)

    def _plan(self, marks: Marks, args: Args) -> Plan:
        if marks.affinity:
            return execute_one(self._routed(marks.affinity, args), args)
        if marks.mode == "round_robin":
            return execute_one(self._next(range(self.size)), args)
        if marks.mode == "execute_rank_zero":
            return execute_one(0, args)
        if marks.mode == "dp_dispatch":
            return dp_dispatch([member.layout for member in self._members], args)
        return execute_all(self.size, args)

    def _routed(self, affinity: Any, args: Args) -> int:
        """A worker on the class of the request's tag, or on one of that class's fallbacks."""
        request = next(iter([*args[0], *args[1].values()]), None)
        tag = tag_of(request)
        wanted = affinity.get(tag, affinity.get("default"))
        if wanted is None:
            raise NoTarget(f"tag {tag!r} is not in hw_affinity ({', '.join(affinity)}); add it, or 'default'")
        for hardware in (wanted, *self._fallbacks.get(wanted, ())):
            ranks = [m.info.rank for m in self._members if m.info.hardware == hardware and m.death is None]
            if ranks:
                self._fell_back += hardware != wanted
                return self._next(ranks)
        living = ", ".join(f"{m.info.name} on {m.info.hardware}" for m in self._members if m.death is None)
        raise NoTarget(f"tag {tag!r} wants {wanted} or a fallback of it; living workers: {living or 'none'}")

    def _next(self, ranks: Sequence[int]) -> int:
        """In turn, among the living ones."""
        living = [rank for rank in ranks if self._members[rank].death is None]
        if not living:
            raise NoTarget(f"the cluster {self.role} has no living worker") from self._members[ranks[0]].death
        self._turn += 1
        return living[self._turn % len(living)]
