"""A cluster whose processes are killed and whose resources go: restarted, replaced, moved."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytest_asyncio

from resmgr import Node, Pool, Request, ResourceManager, StoreUnavailable
from rollart.distributed import ActorOptions, Cluster, RaySession, Worker, WorkerDied, register
from rollart.distributed.failover import Failover

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]


class Killable(Worker):
    @register("execute_all", idempotent=True)
    async def where(self) -> str:
        return self.info.node

    @register("execute_all")
    async def pid(self) -> int:
        return os.getpid()

    @register("round_robin")
    async def wait(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return self.info.hardware


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def session() -> AsyncIterator[RaySession]:
    async with RaySession() as session:
        import ray.cloudpickle

        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        yield session


@pytest_asyncio.fixture(loop_scope="module")
async def rm(session: RaySession, tmp_path: Path) -> AsyncIterator[ResourceManager]:
    async with await ResourceManager.connect(f"embedded:{tmp_path / 'store'}", ttl=0.5, settle=0.2) as rm:
        await rm.register(pool("n0", "n1", "n2"))
        await rm.register(Pool("h20", hardware="H20", nodes=[Node("m0", 2)]))
        yield rm


def pool(*nodes: str) -> Pool:
    return Pool("h800", hardware="H800", nodes=[Node(name, 1) for name in nodes])


def gang(amount: int, *fallback: str) -> Request:
    return Request("gen", prefer=["H800"], fallback=fallback, amount=amount, gang=True)


async def until_moved(cluster: Cluster, rank: int, old: str) -> str:
    """Waits on the worker itself: idempotent calls go on where it is next."""
    async with asyncio.timeout(60):
        while (nodes := await cluster.where())[rank] == old:
            pass
    return str(nodes[rank])


async def test_a_worker_that_keeps_dying_is_replaced_elsewhere(rm: ResourceManager) -> None:
    options = ActorOptions(restarts=1, replacements=1)
    async with Cluster(Killable, rm, 2, role="gen", request=gang(2), options=options) as cluster:
        nodes, pids = await cluster.where(), await cluster.pid()
        os.kill(pids[1], signal.SIGKILL)
        assert await cluster.where() == nodes, "restarted on the same resource"
        again = await cluster.pid()
        assert again[0] == pids[0] and again[1] != pids[1]
        lost = asyncio.ensure_future(cluster.members[1].call("wait", 60))
        os.kill(again[1], signal.SIGKILL)
        with pytest.raises(WorkerDied):
            await lost
        new = await until_moved(cluster, 1, nodes[1])
        assert new not in nodes and not cluster.died.done()
        assert (await cluster.pid())[0] == pids[0]
        stats = cluster.stats()
        assert (stats.restarts, stats.up, stats.failover.replaced) == (2, 2, 1)
        held = {b.id: b.nodes for b in (await rm.status()).bindings}
        assert {cluster.members[rank].info.binding: (node,) for rank, node in enumerate((nodes[0], new))} == held
    assert rm.bindings == {}


async def test_without_a_place_elsewhere_it_stays_dead_and_says_so(rm: ResourceManager) -> None:
    options = ActorOptions(replacements=1, start_timeout=20)
    request = Request("gen", prefer=["H800"], amount=1, labels={})
    await rm.register(pool("n0"), replace=True)
    async with Cluster(Killable, rm, 1, role="gen", request=request, options=options) as cluster:
        os.kill((await cluster.pid())[0], signal.SIGKILL)
        async with asyncio.timeout(20):
            assert (await cluster.died).worker == "gen-0"
        with pytest.raises(WorkerDied):
            await cluster.where()


async def test_a_lost_binding_moves_only_whom_it_must(rm: ResourceManager) -> None:
    async with Cluster(Killable, rm, 2, role="gen", request=gang(2)) as cluster:
        nodes, pids = await cluster.where(), await cluster.pid()
        await rm.register(pool(*({"n0", "n1", "n2"} - {nodes[1]})), replace=True)
        new = await until_moved(cluster, 1, nodes[1])
        assert new not in nodes and (await cluster.where())[0] == nodes[0]
        assert (await cluster.pid())[0] == pids[0]
        assert (cluster.stats().failover.lost, cluster.stats().up) == (1, 2)


async def test_a_lost_class_moves_all_to_the_fallback(rm: ResourceManager) -> None:
    async with Cluster(Killable, rm, 2, role="gen", request=gang(2, "H20")) as cluster:
        await rm.register(Pool("h800", hardware="H800", backend="gone"), replace=True)
        await until_moved(cluster, 0, cluster.members[0].info.node)
        await until_moved(cluster, 1, "")
        assert [(m.info.hardware, m.info.node, m.info.fell_back) for m in cluster.members] == [
            ("H20", "m0", True)
        ] * 2


async def test_what_no_class_can_hold_any_more_dies_by_name(rm: ResourceManager) -> None:
    async with Cluster(Killable, rm, 1, role="gen", request=gang(1)) as cluster:
        await rm.register(Pool("h800", hardware="H800", backend="gone"), replace=True)
        async with asyncio.timeout(30):
            assert "no class could hold it" in (await cluster.died).reason
        with pytest.raises(WorkerDied):
            await cluster.where()


async def test_offers_are_followed_past_a_gap_in_the_events(rm: ResourceManager) -> None:
    await rm.register(pool("n0"), replace=True)
    taken = await rm.bind(gang(1), timeout=0)
    options = ActorOptions(follow_offers=True)
    async with Cluster(Killable, rm, 1, role="gen", request=gang(1, "H20"), options=options) as cluster:
        assert await cluster.where() == ["m0"]
        await rm._store._redis.delete("{resmgr}:events")
        await rm.release(taken)
        assert await until_moved(cluster, 0, "m0") == "n0"
        assert not cluster.died.done()


async def test_a_manager_that_is_closed_first_has_given_all_back(session: RaySession, tmp_path: Path) -> None:
    rm = await ResourceManager.connect(f"embedded:{tmp_path}")
    await rm.register(pool("n0"))
    async with Cluster(Killable, rm, 1, role="gen", request=gang(1)) as cluster:
        assert await cluster.where() == ["n0"]
        await rm.close()


async def test_a_store_that_stays_away_keeps_nobody_from_ending() -> None:
    """What was bound there is free when the lease has ended."""

    class Away:
        async def bind_all(self, *arguments: object) -> list[object]:
            return [SimpleNamespace(id="b")]

        async def release(self, binding: object) -> None:
            raise StoreUnavailable("away")

    failover = Failover(Away(), ActorOptions())  # type: ignore[arg-type]
    await failover.bind([gang(1)])
    await failover.close()


async def test_an_offer_is_followed_when_the_calls_under_way_have_ended(rm: ResourceManager) -> None:
    await rm.register(pool("n0"), replace=True)
    taken = await rm.bind(gang(1), timeout=0)
    options = ActorOptions(follow_offers=True)
    async with Cluster(Killable, rm, 1, role="gen", request=gang(1, "H20"), options=options) as cluster:
        assert await cluster.where() == ["m0"] and cluster.members[0].info.fell_back
        under_way = asyncio.ensure_future(cluster.wait(1.5))
        await rm.release(taken)
        async for event in rm.watch(0):
            if event.kind == "moved_back":
                break
        assert await until_moved(cluster, 0, "m0") == "n0"
        assert await under_way == "H20"
        info = cluster.members[0].info
        assert (info.hardware, info.fell_back, cluster.stats().failover.moved) == ("H800", False, 1)
        assert set(rm.bindings) == {info.binding}
