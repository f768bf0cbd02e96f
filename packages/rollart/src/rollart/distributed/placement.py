"""From what a cluster asks for to the seat of each worker: its hardware class, node and binding."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

import msgspec

from rollart.distributed.decorators import marked_methods
from rollart.distributed.worker import WorkerInfo


class Allocation(Protocol):
    @property
    def pool(self) -> str: ...
    @property
    def node(self) -> str: ...
    @property
    def amount(self) -> float: ...


class Binding(Protocol):
    """What a resource manager granted: resmgr's Binding."""

    @property
    def id(self) -> str: ...
    @property
    def hardware(self) -> str: ...
    @property
    def fell_back(self) -> bool: ...
    @property
    def amount(self) -> float: ...
    @property
    def allocations(self) -> Sequence[Allocation]: ...


class Resources(Protocol):
    """The part of resmgr's ResourceManager that a cluster needs."""

    async def bind(self, request: Any, timeout: float | None = None, on_rebind: Any = None) -> Any: ...
    async def bind_all(self, requests: Any, timeout: float | None = None, on_rebind: Any = None) -> list[Any]: ...
    async def reconfigure(
        self, binding: Any, amount: float, timeout: float | None = None, leave: str = ""
    ) -> Any: ...
    async def move_back(self, binding: Any) -> Any: ...
    async def release(self, binding: Any) -> None: ...
    async def status(self) -> Any: ...
    def watch(self, since: int | None = None) -> AsyncIterator[Any]: ...


class Seat(msgspec.Struct, frozen=True):
    """Where one worker runs."""

    hardware: str = "cpu"
    node: str = ""
    binding: str = ""
    fell_back: bool = False


async def default_requests(resources: Resources, worker_cls: type, role: str, size: int) -> list[Any]:
    """Requests for a cluster that names none: its workers spread over the classes of its affinity, each class with
    the others as fallback; without an affinity, all on one class of those there are.
    """
    from resmgr import Request

    classes = list(
        dict.fromkeys(name for marks in marked_methods(worker_cls).values() for name in marks.affinity.values())
    )
    if not classes:
        pools = (await resources.status()).pools
        classes = list(dict.fromkeys(pool.hardware for pool in pools))
        return [Request(role=role, prefer=classes, amount=size, gang=True)]
    shares = [size * (i + 1) // len(classes) - size * i // len(classes) for i in range(len(classes))]
    return [
        Request(
            role=role, prefer=[name], fallback=[other for other in classes if other != name], amount=share, gang=True
        )
        for name, share in zip(classes, shares, strict=True)
        if share
    ]


def fallbacks(requests: Sequence[Any]) -> dict[str, list[str]]:
    """For each class asked for, the other classes that its request accepts, in order."""
    table: dict[str, list[str]] = {}
    for request in requests:
        classes = [*request.prefer, *request.fallback]
        for name in request.prefer:
            table.setdefault(name, []).extend(other for other in classes if other != name)
    return {name: list(dict.fromkeys(others)) for name, others in table.items()}


def seats(bindings: Sequence[Binding], size: int) -> list[Seat]:
    """Deal `size` workers over the bindings in proportion to their amounts, and in each over its nodes in order."""
    if not bindings:
        return [Seat()] * size
    total = sum(binding.amount for binding in bindings)
    counts = [size * binding.amount / total for binding in bindings]
    if any(count != int(count) for count in counts):
        amounts = [binding.amount for binding in bindings]
        raise ValueError(f"size={size} workers do not divide over the granted amounts {amounts}; use a multiple")
    return [seat for binding, count in zip(bindings, counts, strict=True) for seat in seats_of(binding, int(count))]


def seats_of(binding: Binding, count: int) -> list[Seat]:
    """`count` workers on one binding, over its nodes in order."""
    share = binding.amount / count if count else 0.0
    nodes = [_node_at(binding.allocations, index * share) for index in range(count)]
    return [Seat(binding.hardware, node, binding.id, binding.fell_back) for node in nodes]


def on_node(info: WorkerInfo) -> dict[str, Any]:
    """For `ActorOptions.place`, where pools are Ray's nodes: pins a worker to its binding's node."""
    return {"label_selector": {"ray.io/node-id": info.node}}


def with_gpus(share: float) -> Callable[[WorkerInfo], dict[str, Any]]:
    """For `ActorOptions.place`: each worker sees GPUs of its own, or, of a fraction, one that it shares."""
    return lambda info: {"num_gpus": share}


def _node_at(allocations: Sequence[Allocation], offset: float) -> str:
    """The node that holds the unit at `offset` of all allocations laid end to end."""
    for allocation in allocations:
        if offset < allocation.amount:
            return allocation.node or allocation.pool
        offset -= allocation.amount
    return ""
