"""A cluster on a real multi-node Ray (nodes on one machine) with H800, H20 and cpu nodes, of which one dies."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from resmgr import Request, ResourceManager
from rollart.distributed import ActorOptions, Cluster, Worker, WorkerDied, on_node, register

ray = pytest.importorskip("ray")

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(500),
    pytest.mark.asyncio(loop_scope="module"),
]

UNITS = {"H800": "H800", "H20": "H20", "cpu": "CPU"}


class Located(Worker):
    @register("execute_all", idempotent=True)
    async def where(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())

    @register("execute_all")
    async def pid(self) -> int:
        return os.getpid()

    @register("round_robin")
    async def wait(self) -> None:
        await asyncio.get_running_loop().create_future()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    import ray.cloudpickle
    from ray.cluster_utils import Cluster as Nodes

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_raylet_start_wait_time_s", "120")  # a busy machine
        nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        try:
            for resources in ({"H800": 1}, {"H800": 1}, {"H20": 2}):
                nodes.add_node(num_cpus=1, resources=resources, object_store_memory=80 << 20)
            ray.init(address=nodes.address, logging_level="ERROR", log_to_driver=False)
            ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
            yield nodes
        finally:
            ray.shutdown()
            nodes.shutdown()


@pytest_asyncio.fixture(loop_scope="module")
async def rm(nodes: Any, tmp_path: Path) -> AsyncIterator[ResourceManager]:
    from resmgr.ray import RayBackend

    async with (
        await ResourceManager.connect(f"embedded:{tmp_path / 'store'}", ttl=2) as rm,
        RayBackend(rm, UNITS, interval=0.2),
    ):
        yield rm


async def test_workers_are_restarted_replaced_and_leave_a_dead_node(nodes: Any, rm: ResourceManager) -> None:
    request = Request("gen", prefer=["H800"], fallback=["H20"], amount=1)
    options = ActorOptions(restarts=1, replacements=1, place=on_node, stop_timeout=1)
    async with Cluster(Located, rm, 1, role="gen", request=request, options=options) as cluster:
        member = cluster.members[0]
        (first,) = await cluster.where()
        assert (member.info.hardware, member.info.node) == ("H800", first)

        os.kill((await cluster.pid())[0], signal.SIGKILL)
        assert await cluster.where() == [first], "restarted on the same node"

        os.kill((await cluster.pid())[0], signal.SIGKILL)
        async with asyncio.timeout(120):
            while (second := (await cluster.where())[0]) == first:
                pass
        assert (member.info.hardware, member.info.node) == ("H800", second), "replaced on another one"

        under_way = asyncio.ensure_future(cluster.wait())
        dying = next(node for node in nodes.worker_nodes if node.node_id == second)
        await asyncio.to_thread(nodes.remove_node, dying, False)
        with pytest.raises(WorkerDied):
            await under_way
        async with asyncio.timeout(120):
            while (third := (await cluster.where())[0]) == second:
                pass
        assert third == member.info.node and third in (first, *(n.node_id for n in nodes.worker_nodes))
        assert cluster.stats().failover.lost + cluster.stats().failover.replaced == 2
        assert len((await rm.status()).bindings) == 1
    assert rm.bindings == {}


async def test_the_fallback_is_taken_when_the_last_node_of_a_class_dies(nodes: Any, rm: ResourceManager) -> None:
    request = Request("gen", prefer=["H800"], fallback=["H20"], amount=1)
    options = ActorOptions(restarts=1, place=on_node, stop_timeout=1)
    async with Cluster(Located, rm, 1, role="last", request=request, options=options) as cluster:
        (node,) = await cluster.where()
        dying = next(found for found in nodes.worker_nodes if found.node_id == node)
        await asyncio.to_thread(nodes.remove_node, dying, False)
        async with asyncio.timeout(120):
            while cluster.members[0].info.hardware == "H800" or cluster.members[0].death is not None:
                await rm.status()
        assert await cluster.where() == [cluster.members[0].info.node]
        assert (cluster.members[0].info.hardware, cluster.members[0].info.fell_back) == ("H20", True)
