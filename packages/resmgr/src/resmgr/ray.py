"""Ray as a backend: its nodes become pools, bindings become placement groups or pinned actors.

Ray places a group once and for all; here a node that dies ends the bindings on it, and they are granted again
elsewhere, fallback included (tests: `test_resmgr_ray.py`). The bundles claim Ray's own resources too, so that work
which does not go through resmgr is not double-booked either.
"""

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import msgspec
import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from resmgr.errors import BindTimeout, Invalid
from resmgr.follower import Follower
from resmgr.manager import ResourceManager
from resmgr.values import Binding, Node, Pool

NODE_ID = "ray.io/node-id"
HARDWARE = "hardware"


class Placement(msgspec.Struct, frozen=True):
    """A binding's placement group: one bundle a chunk, in the order of its allocations."""

    binding: Binding
    group: PlacementGroup
    bundles: tuple[dict[str, float], ...]

    def options(self, rank: int) -> dict[str, Any]:
        """For `actor_class.options(**...)`: the actor takes bundle `rank` whole."""
        _check_rank(rank, len(self.bundles))
        return {
            "num_cpus": 0,
            **_as_options(self.bundles[rank]),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=rank),
        }


class RayBackend:
    """The nodes of the connected Ray cluster as pools `ray-CLASS`, followed while the context lasts.

    `units` says which Ray resource counts a class: {"H800": "GPU", "cpu": "CPU"}. A node belongs to the class of its
    label `hardware`; without the label to every class whose resource is the class's own name or CPU.
    """

    def __init__(self, manager: ResourceManager, units: Mapping[str, str], interval: float = 1.0) -> None:
        self._units = dict(units)
        self._interval = interval
        self._follower = Follower(manager)

    async def __aenter__(self) -> Self:
        await self.refresh()
        self._follower.start(self._follow(), "resmgr-ray-nodes")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._follower.stop()

    async def refresh(self) -> None:
        """Registers what Ray says now; the bindings on nodes that are gone are lost."""
        nodes = [node for node in await asyncio.to_thread(ray.nodes) if node["Alive"]]
        for hardware, unit in self._units.items():
            pool = self._pool(hardware, unit, nodes)
            await self._follower.register(pool)

    async def _follow(self) -> None:
        """Asks Ray for its nodes every `interval` seconds: it has no public call that waits for a change."""
        while True:
            await asyncio.sleep(self._interval)
            await self.refresh()

    def _pool(self, hardware: str, unit: str, nodes: list[dict[str, Any]]) -> Pool:
        found = [
            Node(node["NodeID"], node["Resources"][unit], labels=_labels(node))
            for node in nodes
            if node["Resources"].get(unit, 0) > 0 and self._is(node, hardware, unit)
        ]
        return Pool(f"ray-{hardware}", hardware=hardware, backend="ray", nodes=sorted(found, key=lambda n: n.name))

    def _is(self, node: dict[str, Any], hardware: str, unit: str) -> bool:
        label = node["Labels"].get(HARDWARE)
        return label == hardware or (label is None and unit in (hardware, "CPU"))

    async def place(self, binding: Binding, timeout: float = 30.0) -> Placement:
        """A placement group with a bundle for each chunk, pinned to the node that the binding has it on."""
        bundles, pins = self._bundles(binding)
        making = asyncio.ensure_future(asyncio.to_thread(placement_group, bundles, bundle_label_selector=pins))
        try:
            async with asyncio.timeout(timeout):
                group = await asyncio.shield(making)
                await group.ready()
        except BaseException as error:
            await asyncio.to_thread(remove_placement_group, await making)  # it is made, whoever waits for it
            if isinstance(error, TimeoutError):
                raise BindTimeout(
                    f"Ray did not place binding {binding.id} on {binding.nodes} within {timeout} s; "
                    "is the hardware used by work that was not bound here?"
                ) from None
            raise
        return Placement(binding, group, tuple(bundles))

    async def remove(self, placement: Placement) -> None:
        """Ends the group and the actors in it; the binding stays."""
        await asyncio.to_thread(remove_placement_group, placement.group)

    def options(self, binding: Binding, rank: int = 0) -> dict[str, Any]:
        """For `actor_class.options(**...)` without a group: an actor for chunk `rank`, pinned to its node."""
        bundles, pins = self._bundles(binding)
        _check_rank(rank, len(bundles))
        return {"num_cpus": 0, **_as_options(bundles[rank]), "label_selector": pins[rank]}

    def _bundles(self, binding: Binding) -> tuple[list[dict[str, float]], list[dict[str, str]]]:
        if binding.hardware not in self._units:
            raise Invalid(f"binding {binding.id} is on {binding.hardware}, of which units={self._units} say nothing")
        unit = self._units[binding.hardware]
        bundles, pins = [], []
        for part in binding.allocations:
            size = min(binding.chunk, part.amount)
            for _ in range(round(part.amount / size)):
                bundles.append({unit: size})
                pins.append({NODE_ID: part.node})
        return bundles, pins


def _check_rank(rank: int, count: int) -> None:
    if rank not in range(count):
        raise Invalid(f"rank={rank!r} must be 0 to {count - 1}: the binding has {count} chunks")


def _labels(node: dict[str, Any]) -> dict[str, str]:
    return {name: value for name, value in node["Labels"].items() if name != NODE_ID}


def _as_options(bundle: Mapping[str, float]) -> dict[str, Any]:
    """A bundle in the words of `.options`, where CPU and GPU have names of their own."""
    named = {"CPU": "num_cpus", "GPU": "num_gpus"}
    options: dict[str, Any] = {named[name]: amount for name, amount in bundle.items() if name in named}
    custom = {name: amount for name, amount in bundle.items() if name not in named}
    return {**options, "resources": custom} if custom else options
