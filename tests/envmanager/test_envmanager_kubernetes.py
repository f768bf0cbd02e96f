"""Environments in pods: the real client against a small API server (or a real one), pods as local processes."""

import asyncio
import threading
from typing import Any

import pytest
from tests.envmanager.fakes import FakePolicy

from envmanager import (
    ClusterError,
    EnvManager,
    Evicted,
    ImagePullFailed,
    InfrastructureError,
    Limits,
    NodeLost,
    PodDied,
    PodLost,
    QuotaExceeded,
)

pytest.importorskip("kubernetes", reason="the extra `kubernetes` is not installed")

from tests.envmanager.clusters import REAL, LocalCluster, cluster
from tests.envmanager.nodeagent import NEVER_READY, NO_IMAGE

from envmanager.backends.cluster import Cluster

pytestmark = pytest.mark.real
double = pytest.mark.skipif(REAL, reason="the fault is the double's")

FINE = "tests.envmanager.misbehaving:Fine"
BAD = "tests.envmanager.misbehaving:Bad"
POLICY = FakePolicy(generate_s=0.0)
LIMITS = Limits(reset_timeout=60.0, step_timeout=30.0, reset_retries=0)


@pytest.fixture(scope="module")
def k8s(tmp_path_factory):
    with cluster(tmp_path_factory.mktemp("cluster")) as made:
        if made.agent is None:
            pytest.skip("the faults need the node agent")
        yield made


async def play(backend: Any, key: str = "fine") -> Any:
    return await EnvManager(backend, POLICY, limits=LIMITS).run(key, 0)


async def sees(condition: Any) -> None:
    """What another thread or process does gives no event here."""
    async with asyncio.timeout(30):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_warm_pod_is_ready_and_replaced(k8s: LocalCluster):
    async with k8s.backend(FINE, warm=1) as backend:
        await sees(lambda: backend._pool._spares[0].done())
        assert (await play(backend)).reward == 1.0
        assert backend.stats().ready == 1 and backend.stats().created == 2
    assert backend.stats().created == 2 and not k8s.pods()


async def test_a_pod_serves_again_only_when_clean(k8s: LocalCluster):
    async with k8s.backend(BAD, warm=1, reuse=True) as backend:
        first, second = await play(backend), await play(backend)
        created = backend.stats().created
        with pytest.raises(PodDied, match="Error 7"):
            await play(backend, "dies")
        third = await play(backend)
        assert len({played.metadata["pid"] for played in (first, second)}) <= created
        assert third.metadata["pid"] not in {first.metadata["pid"], second.metadata["pid"]} or created == 2
        assert backend.stats().lost == {"PodDied": 1}
    assert not k8s.pods()


@pytest.mark.parametrize(
    ("fault", "kind", "said"),
    [
        ("evict", Evicted, "low on resource"),
        ("lose", NodeLost, "Taint manager"),
        ("remove", PodLost, "somebody else"),
    ],
)
async def test_a_lost_pod_ends_the_call_that_waits_for_it(k8s: LocalCluster, fault, kind, said):
    assert k8s.agent is not None
    async with k8s.backend(BAD) as backend:
        env = backend("hangs")
        await env.reset(seed=0)
        step = asyncio.create_task(env.step("x"))
        (name,) = await asyncio.to_thread(k8s.pods)
        await asyncio.to_thread(getattr(k8s.agent, fault), name)
        async with asyncio.timeout(20):
            with pytest.raises(kind, match=said):
                await step
        await env.close()
        assert (await play(backend)).reward == 1.0
    assert not k8s.pods()


async def test_an_image_that_cannot_be_pulled(k8s: LocalCluster):
    async with k8s.backend(FINE, {"image": NO_IMAGE}) as backend:
        with pytest.raises(ImagePullFailed, match="ImagePullBackOff: no-such-image: not found"):
            await play(backend)
        with pytest.raises(ImagePullFailed):
            await backend.prefetch(30.0)
    assert not k8s.pods()


async def test_a_pod_that_is_never_ready(k8s: LocalCluster):
    async with k8s.backend(FINE, {"image": NEVER_READY}, start_s=1.0) as backend:
        with pytest.raises(PodLost, match=r"was not ready within 1\.0 s"):
            await play(backend)
    assert not k8s.pods()


async def test_prefetch_waits_for_every_node(k8s: LocalCluster):
    async with k8s.backend(FINE) as backend:
        assert await backend.prefetch(60.0) >= 1 and await backend.prefetch(60.0) >= 1
    assert k8s.agent is not None
    await sees(lambda: not k8s.agent.names("envmanager/role=prefetch"))


async def test_a_cancelled_start_leaves_no_pod(k8s: LocalCluster):
    async with k8s.backend(FINE) as backend:
        for _ in range(3):
            taking = asyncio.create_task(backend("k").reset(seed=0))
            await sees(lambda: backend._pool._pods._known)
            taking.cancel()
            await asyncio.wait([taking])
        await sees(lambda: not k8s.pods())
        taking = asyncio.create_task(backend("k").reset(seed=0))
        await asyncio.sleep(0)
    with pytest.raises((InfrastructureError, asyncio.CancelledError)):
        await taking
    assert not k8s.pods()


async def test_orphans_are_swept_and_foreign_pods_are_not(k8s: LocalCluster):
    async with k8s.backend(FINE, owner="somebody-else") as other:
        foreign = other("k")
        await foreign.reset(seed=0)
        left = k8s.backend(FINE)  # this one is never closed, as when its process is killed
        await left._pool.open()
        await left("k").reset(seed=0)
        (orphan,) = k8s.pods()
        async with k8s.backend(FINE) as backend:
            assert backend.stats().orphans == 1
            await sees(lambda: orphan not in k8s.pods())
            assert (await foreign.step("x"))[1] == 0.5
        await foreign.close()
        await left.close()


async def test_a_closed_backend_leaves_no_thread(k8s: LocalCluster):
    def ours() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("kubernetes")]

    async with k8s.backend(FINE) as backend:
        await play(backend)
        assert ours()
    await sees(lambda: not ours())


@double
async def test_an_expired_watch_costs_nothing(k8s: LocalCluster):
    assert k8s.api is not None
    async with k8s.backend(BAD) as backend:
        env = backend("fine")
        await env.reset(seed=0)
        k8s.api.expire()
        assert (await play(backend)).reward == 1.0
        k8s.api.cut_watches()
        assert (await play(backend)).reward == 1.0
        assert (await env.step("x"))[1] == 0.5
        await env.close()
    assert not k8s.pods()


@double
async def test_a_full_quota(k8s: LocalCluster):
    assert k8s.api is not None
    k8s.api.quota = 1
    try:
        async with k8s.backend(FINE, start_s=20.0) as backend:
            first = backend("k")
            await first.reset(seed=0)
            second = asyncio.create_task(play(backend))
            await sees(lambda: backend.stats().full)
            await first.close()  # makes room
            assert (await second).reward == 1.0
        k8s.api.quota = 0
        async with k8s.backend(FINE, start_s=0.3) as backend:
            with pytest.raises(QuotaExceeded, match="exceeded quota"):
                await play(backend)
    finally:
        k8s.api.quota = None
    assert not k8s.pods()


async def test_pods_are_used_again_without_a_warm_pool(k8s: LocalCluster):
    async with k8s.backend(FINE, reuse=True) as backend:
        pids = {(await play(backend)).metadata["pid"] for _ in range(3)}
        assert len(pids) == 1 and backend.stats().created == 1
    assert not k8s.pods()


@double
async def test_an_api_that_refuses_leaves_no_thread(k8s: LocalCluster):
    assert k8s.api is not None
    k8s.api.failures.extend([(403, {})])
    with pytest.raises(ClusterError, match="answered 403"):
        async with k8s.backend(FINE):
            raise AssertionError
    backend = k8s.backend(FINE)
    await backend._pool.open()
    k8s.api.failures.extend([(403, {})])
    with pytest.raises(ClusterError, match="answered 403"):
        await backend.close()
    await sees(lambda: not [t for t in threading.enumerate() if t.name.startswith("kubernetes")])


@double
async def test_a_lost_answer_makes_no_second_pod(k8s: LocalCluster):
    assert k8s.api is not None
    async with k8s.backend(FINE) as backend:
        k8s.api.lose_answers = 1
        assert (await play(backend)).reward == 1.0
        assert backend.stats().created == 1
    assert not k8s.pods()


@double
async def test_what_may_pass_is_tried_again(k8s: LocalCluster):
    assert k8s.api is not None
    async with k8s.backend(FINE) as backend:
        k8s.api.failures.extend([(500, {}), (429, {"Retry-After": "0"}), (503, {})])
        assert (await play(backend)).reward == 1.0


@double
async def test_every_refusal_has_its_type(k8s: LocalCluster):
    assert k8s.api is not None
    async with k8s.backend(FINE) as backend:
        k8s.api.failures.extend([(422, {})])
        with pytest.raises(ClusterError, match="answered 422: told to fail"):
            await play(backend)
        k8s.api.failures.extend([(500, {})] * 5)
        with pytest.raises(ClusterError, match="after 5 tries"):
            await play(backend)
    assert not k8s.pods()


@double
async def test_the_loop_is_free_while_the_server_is_silent(k8s: LocalCluster):
    assert k8s.api is not None
    api = Cluster(k8s.namespace, kubeconfig=k8s.kubeconfig, retries=0)
    k8s.api.silent = True
    listing = asyncio.create_task(api.list("pod", ""))
    try:
        for _ in range(20):
            await asyncio.sleep(0.01)
        assert not listing.done()
    finally:
        k8s.api.silent = False
        k8s.api.cut_watches()
        listing.cancel()
        await asyncio.wait([listing])


async def test_no_cluster_is_said(tmp_path, monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ClusterError, match="no Kubernetes cluster is configured"):
        Cluster("default", kubeconfig=str(tmp_path / "nothing"))


def test_bad_configuration(k8s: LocalCluster):
    with pytest.raises(ValueError, match="warm is -1"):
        k8s.backend(FINE, warm=-1)
    with pytest.raises(ValueError, match="owner is 'Me!'"):
        k8s.backend(FINE, owner="Me!")
    with pytest.raises(ValueError, match="name both"):
        k8s.template("")
