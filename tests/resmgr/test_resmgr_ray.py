"""Bindings on a real multi-node Ray cluster (nodes on one machine): placed, pinned, and moved when a node dies."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from resmgr import Binding, BindTimeout, Request

ray = pytest.importorskip("ray")

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(400)]

UNITS = {"H800": "H800", "H20": "H20", "cpu": "CPU"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_raylet_start_wait_time_s", "120")  # a busy machine
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        try:
            cluster.add_node(num_cpus=0, resources={"H800": 2}, labels={"zone": "x"})
            cluster.add_node(num_cpus=0, resources={"H20": 4})
            ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


class Where:
    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())


async def test_nodes_become_pools_bindings_become_placements_and_a_dead_node_moves_them(place, cluster):
    from resmgr.ray import RayBackend

    moved: asyncio.Queue[tuple[Binding, Binding | None]] = asyncio.Queue()
    rm = await place.connect()
    actor = ray.remote(Where)
    async with RayBackend(rm, UNITS, interval=0.2) as backend:
        pools = {p.hardware: (p.total, p.nodes) for p in (await rm.status()).pools}
        assert pools == {"H800": (2, 1), "H20": (4, 1), "cpu": (2, 1)}

        request = Request("gen", prefer=["H800"], fallback=["H20"], amount=2, gang=True, labels={})
        binding = await rm.bind(request, timeout=0, on_rebind=lambda *pair: moved.put_nowait(pair))
        placement = await backend.place(binding)
        actors = [actor.options(**placement.options(rank)).remote() for rank in range(2)]
        assert {await a.node.remote() for a in actors} == set(binding.nodes)

        half = await rm.bind(Request("env", prefer=["cpu"], amount=0.5), timeout=0)
        pinned = actor.options(**backend.options(half)).remote()
        assert await pinned.node.remote() == half.nodes[0]

        stranger = actor.options(num_cpus=0, resources={"H20": 3}).remote()
        await stranger.node.remote()
        fallen = await rm.bind(request, timeout=0)
        with pytest.raises(BindTimeout, match="not bound here"):
            await backend.place(fallen, timeout=0.5)
        ray.kill(stranger)
        await rm.release(fallen)

        (node,) = [
            n for n in cluster.worker_nodes if n.unique_id == binding.nodes[0] or n.node_id == binding.nodes[0]
        ]
        await asyncio.to_thread(cluster.remove_node, node, False)
        lost, new = await moved.get()
        assert lost == binding and new is not None and (new.hardware, new.fell_back) == ("H20", True)
        await backend.remove(placement)
        again = await backend.place(new)
        actors = [actor.options(**again.options(rank)).remote() for rank in range(2)]
        assert {await a.node.remote() for a in actors} == set(new.nodes)
        await backend.remove(again)
