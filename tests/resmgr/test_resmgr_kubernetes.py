"""Kubernetes as a backend, over the official client: against a small API server here, and against a real one where
KUBECONFIG names it (any: nodes and pods are made by the test, which also plays scheduler and kubelet).
"""

import asyncio
import os
import threading
import uuid
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.resmgr.kubernetes_server import ApiServer
from urllib3.exceptions import HTTPError

from resmgr import Binding, BindTimeout, Invalid, NotPlaced, Request, ResourceManager

kubernetes = pytest.importorskip("kubernetes")

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

PRODUCT = "nvidia.com/gpu.product"
SPEC = {"containers": [{"name": "main", "image": "registry.example/worker:1", "env": [{"name": "A", "value": "b"}]}]}


class Cluster:
    """Nodes and pods through the API alone, so that any API server does."""

    def __init__(self, api: Any, server: ApiServer | None) -> None:
        self.api = api
        self.server = server
        self.core = kubernetes.client.CoreV1Api(api)
        self.tag = uuid.uuid4().hex[:6]
        self.nodes: list[str] = []

    @property
    def labels(self) -> dict[str, str]:
        """Those of this test's nodes alone."""
        return {"resmgr.io/test": self.tag}

    def classes(self) -> Any:
        from resmgr.kubernetes import NodeClass

        h800 = NodeClass("H800", {PRODUCT: "NVIDIA-H800", **self.labels})
        return [h800, NodeClass("H20", {PRODUCT: "NVIDIA-H20", **self.labels}), NodeClass("cpu", self.labels, "cpu")]

    async def call(self, name: str, *args: Any, **more: Any) -> Any:
        return await asyncio.to_thread(getattr(self.core, name), *args, **more)

    async def add_node(self, name: str, product: str = "", **allocatable: str) -> str:
        name = f"{name}-{self.tag}"
        labels = {**self.labels, "zone": "x"} | ({PRODUCT: product} if product else {})
        resources = {"nvidia.com/gpu" if key == "gpu" else key: value for key, value in allocatable.items()}
        self.nodes.append(name)
        await self.call("create_node", {"metadata": {"name": name, "labels": labels}})
        ready = [{"type": "Ready", "status": "True", "reason": "Test", "message": ""}]
        status = {"allocatable": resources, "capacity": resources, "conditions": ready}
        await self.call("patch_node_status", name, {"status": status})
        return name

    async def run_pods(self, backend: Any) -> None:
        """Scheduler and kubelet: whatever is pinned to a node runs there."""
        while True:
            found = await self.call("list_namespaced_pod", "default", label_selector=f"resmgr.io/owner={self.tag}")
            for pod in found.items:
                if pod.status.phase == "Pending" and pod.spec.node_name is None:
                    node = pod.spec.affinity.node_affinity.required_during_scheduling_ignored_during_execution
                    (where,) = node.node_selector_terms[0].match_fields[0].values
                    body = {"metadata": {"name": pod.metadata.name}, "target": {"kind": "Node", "name": where}}
                    raw = {"_preload_content": False}
                    await self.call("create_namespaced_pod_binding", pod.metadata.name, "default", body, **raw)
                    phase = {"status": {"phase": "Running"}}
                    await self.call("patch_namespaced_pod_status", pod.metadata.name, "default", phase)
            await asyncio.sleep(0.02)


@asynccontextmanager
async def double() -> AsyncIterator[Cluster]:
    async with ApiServer().serving() as server:
        settings = kubernetes.client.Configuration(host=server.url)
        with kubernetes.client.ApiClient(settings) as api:
            yield Cluster(api, server)


@asynccontextmanager
async def real() -> AsyncIterator[Cluster]:
    if not os.environ.get("KUBECONFIG"):
        pytest.skip("KUBECONFIG is not set; with it this runs against that API server")
    cluster = Cluster(kubernetes.config.new_client_from_config(), None)
    try:
        yield cluster
    finally:
        await cluster.call(
            "delete_collection_namespaced_pod", "default", label_selector=f"resmgr.io/owner={cluster.tag}"
        )
        for name in cluster.nodes:
            await cluster.call("delete_node", name)


@pytest.fixture(params=["double", "real"])
async def cluster(request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    async with double() if request.param == "double" else real() as cluster:
        yield cluster


@pytest.fixture
async def faulty() -> AsyncIterator[Cluster]:
    async with double() as cluster:
        yield cluster


def backend_of(rm: ResourceManager, cluster: Cluster) -> Any:
    from resmgr.kubernetes import KubernetesBackend

    return KubernetesBackend(rm, cluster.classes(), api=cluster.api, owner=cluster.tag, retry=0.05)


async def totals(rm: ResourceManager) -> dict[str, float]:
    return {p.hardware: p.total for p in (await rm.status()).pools}


async def until_totals(rm: ResourceManager, **wanted: float) -> None:
    async for _ in rm.watch(0):
        if await totals(rm) == wanted:
            return


def gang(amount: float, **more: Any) -> Request:
    return Request("gen", prefer=["H800"], fallback=["H20"], amount=amount, gang=True, **more)


async def test_nodes_become_pools_by_their_labels(place, cluster):
    await cluster.add_node("a", "NVIDIA-H800", gpu="8", cpu="96")
    await cluster.add_node("b", "NVIDIA-H20", gpu="8", cpu="96")
    await cluster.add_node("c", cpu="3500m")
    rm = await place.connect()
    async with backend_of(rm, cluster):
        assert await totals(rm) == {"H800": 8, "H20": 8, "cpu": 3.5}
        binding = await rm.bind(gang(4, labels={"zone": "x"}), timeout=0)
        assert binding.nodes == (f"a-{cluster.tag}",)
        await cluster.add_node("d", "NVIDIA-H800", gpu="8")
        await until_totals(rm, H800=16, H20=8, cpu=3.5)


@pytest.mark.parametrize("how", ["cordon", "not ready", "delete"])
async def test_a_node_that_goes_shrinks_its_pool_and_moves_its_bindings(place, cluster, how):
    moved: asyncio.Queue[tuple[Binding, Binding | None]] = asyncio.Queue()
    lost_node = await cluster.add_node("a", "NVIDIA-H800", gpu="8")
    await cluster.add_node("b", "NVIDIA-H20", gpu="8")
    rm = await place.connect()
    async with backend_of(rm, cluster):
        binding = await rm.bind(gang(8), timeout=0, on_rebind=lambda *pair: moved.put_nowait(pair))
        assert binding.hardware == "H800"
        if how == "cordon":
            await cluster.call("patch_node", lost_node, {"spec": {"unschedulable": True}})
        elif how == "not ready":
            state = {"type": "Ready", "status": "False", "reason": "Test", "message": ""}
            await cluster.call("patch_node_status", lost_node, {"status": {"conditions": [state]}})
        else:
            cluster.nodes.remove(lost_node)
            await cluster.call("delete_node", lost_node)
        lost, new = await moved.get()
        assert lost == binding and new is not None and (new.hardware, new.fell_back) == ("H20", True)
        assert await totals(rm) == {"H800": 0, "H20": 8, "cpu": 0}
        if how == "cordon":
            await cluster.call("patch_node", lost_node, {"spec": {"unschedulable": False}})
            await until_totals(rm, H800=8, H20=8, cpu=0)


async def test_pods_run_where_their_binding_is(place, cluster):
    for name in ("a", "b"):
        await cluster.add_node(name, "NVIDIA-H800", gpu="4")
    rm = await place.connect()
    async with backend_of(rm, cluster) as backend:
        kubelet = asyncio.create_task(cluster.run_pods(backend))
        binding = await rm.bind(gang(8, chunk=2), timeout=0)
        placed = await backend.place(binding, SPEC, timeout=30)
        found = await cluster.call("list_namespaced_pod", "default", label_selector=f"resmgr.io/owner={cluster.tag}")
        pods = {pod.metadata.name: pod for pod in found.items}
        assert sorted(pods) == sorted(placed.names) and len(pods) == 4
        nodes = [pods[name].spec.node_name for name in placed.names]
        assert nodes == [a.node for a in binding.allocations for _ in range(int(a.amount / 2))]
        container = pods[placed.names[3]].spec.containers[0]
        assert container.resources.limits["nvidia.com/gpu"] == "2"
        env = {entry.name: entry.value for entry in container.env}
        assert env == {
            "A": "b",
            "RESMGR_BINDING": binding.id,
            "RESMGR_TOKEN": str(binding.token),
            "RESMGR_RANK": "3",
        }
        assert await backend.sweep() == []
        await rm.release(binding)
        assert sorted(await backend.sweep()) == sorted(placed.names)
        kubelet.cancel()
        await asyncio.wait([kubelet])


async def test_pods_that_do_not_run_leave_nothing(place, faulty):
    await faulty.add_node("a", "NVIDIA-H800", gpu="4")
    rm = await place.connect()
    async with backend_of(rm, faulty) as backend:
        binding = await rm.bind(gang(2), timeout=0)
        with pytest.raises(BindTimeout, match="not bound here"):
            await backend.place(binding, SPEC, timeout=0.3)
        assert faulty.server.objects["pods"] == {}

        placing = asyncio.create_task(backend.place(binding, SPEC))
        await faulty.server.until(lambda: len(faulty.server.objects["pods"]) == 2)
        (name, _) = faulty.server.objects["pods"]
        failed = {"status": {"phase": "Failed", "message": "image is gone"}}
        await faulty.call("patch_namespaced_pod_status", name, "default", failed)
        with pytest.raises(NotPlaced, match=f"{name} failed: image is gone"):
            await placing
        assert faulty.server.objects["pods"] == {}

        placing = asyncio.create_task(backend.place(binding, SPEC))
        await faulty.server.until(lambda: len(faulty.server.objects["pods"]) == 2)
        placing.cancel()
        await asyncio.wait([placing])
        assert placing.cancelled() and faulty.server.objects["pods"] == {}


async def test_a_watch_that_breaks_during_a_placement_costs_nothing(place, faulty):
    await faulty.add_node("a", "NVIDIA-H800", gpu="4")
    rm = await place.connect()
    async with backend_of(rm, faulty) as backend:
        binding = await rm.bind(gang(2), timeout=0)
        placing = asyncio.create_task(backend.place(binding, SPEC, timeout=30))
        await faulty.server.until(lambda: len(faulty.server.watches) == 2)
        faulty.server.drop()
        await faulty.server.until(lambda: not faulty.server.watches)
        kubelet = asyncio.create_task(faulty.run_pods(backend))
        assert len((await placing).names) == 2
        kubelet.cancel()
        await asyncio.wait([kubelet])

        binding = await rm.bind(gang(1), timeout=0)
        placing = asyncio.create_task(backend.place(binding, SPEC, timeout=30))
        await faulty.server.until(lambda: len(faulty.server.watches) == 2)
        faulty.server.drop()
        name = f"gen-{binding.id[:12]}-{binding.token}-0"
        await faulty.call("delete_namespaced_pod", name, "default", _preload_content=False)
        with pytest.raises(NotPlaced, match=f"pod {name} was deleted"):
            await placing


async def test_watches_keep_no_thread_from_other_calls(place, faulty):
    await faulty.add_node("a", "NVIDIA-H800", gpu="4")
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    rm = await place.connect()
    async with backend_of(rm, faulty) as backend:
        bindings = [await rm.bind(gang(1), timeout=0) for _ in range(4)]
        placing = [asyncio.create_task(backend.place(binding, SPEC, timeout=30)) for binding in bindings]
        async with asyncio.timeout(20):
            await faulty.server.until(lambda: len(faulty.server.watches) == 5)
            kubelet = asyncio.create_task(faulty.run_pods(backend))
            await asyncio.gather(*placing)
        kubelet.cancel()
        await asyncio.wait([kubelet])


async def test_what_the_server_refuses_is_told(place, faulty):
    await faulty.add_node("a", "NVIDIA-H800", gpu="4")
    rm = await place.connect()
    async with backend_of(rm, faulty) as backend:
        binding = await rm.bind(gang(1), timeout=0)
        name = f"gen-{binding.id[:12]}-{binding.token}-0"
        await faulty.call("create_namespaced_pod", "default", {"metadata": {"name": name}, "spec": SPEC})
        with pytest.raises(NotPlaced, match="409"):
            await backend.place(binding, SPEC)
        with pytest.raises(Invalid, match="with containers"):
            await backend.place(binding, {})
        with pytest.raises(Invalid, match="not a pod's"):
            await backend.place(binding, {"containers": [{"name": 3, "image": "x"}]})
        half = await rm.bind(gang(0.5), timeout=0)
        with pytest.raises(Invalid, match=r"whole units of nvidia.com/gpu, not 0\.5"):
            await backend.place(half, SPEC)


async def test_a_version_that_is_too_old_is_answered_by_a_new_list(place, faulty):
    await faulty.add_node("a", "NVIDIA-H800", gpu="4")
    rm = await place.connect()
    async with backend_of(rm, faulty):
        lists = faulty.server.lists
        await faulty.server.until(lambda: bool(faulty.server.watches))
        await faulty.add_node("b", "NVIDIA-H800", gpu="4")
        await until_totals(rm, H800=8, H20=0, cpu=0)
        assert faulty.server.lists == lists
        faulty.server.version += 5
        faulty.server.compact()
        faulty.server.drop()
        await faulty.add_node("c", "NVIDIA-H800", gpu="4")
        await until_totals(rm, H800=12, H20=0, cpu=0)
        assert faulty.server.lists > lists


async def test_a_bookmark_moves_the_version_so_that_the_next_watch_needs_no_list(faulty):
    from resmgr.kubernetes_objects import NodeObject
    from resmgr.kubernetes_watch import Watch

    server = faulty.server
    await faulty.add_node("a", "NVIDIA-H800", gpu="4")
    async with Watch(faulty.core.list_node, "1", NodeObject) as watch:
        changes = aiter(watch)
        assert [(await anext(changes))[0] for _ in range(2)] == ["ADDED", "MODIFIED"]
        coming = asyncio.ensure_future(anext(changes))
        await server.bookmark("nodes")
        bookmarked = server.version
        await server.until(lambda: server.told == bookmarked)
        server.compact()
        server.drop()
        with pytest.raises(HTTPError):
            await coming
        assert watch.version == str(bookmarked)
    async with Watch(faulty.core.list_node, watch.version, NodeObject) as again:
        await faulty.add_node("b", "NVIDIA-H800", gpu="4")
        assert (await anext(aiter(again)))[1].name == f"b-{faulty.tag}"


async def test_an_outage_changes_nothing_and_is_followed_by_a_list(place, faulty):
    await faulty.add_node("a", "NVIDIA-H800", gpu="4")
    rm = await place.connect()
    async with backend_of(rm, faulty):
        binding = await rm.bind(gang(4), timeout=0)
        await faulty.server.until(lambda: bool(faulty.server.watches))
        faulty.server.refuse = 4
        faulty.server.drop()
        await faulty.server.until(lambda: faulty.server.refuse == 0)
        await faulty.add_node("b", "NVIDIA-H20", gpu="4")
        await until_totals(rm, H800=4, H20=4, cpu=0)
        await rm.check(binding)


async def test_leaving_ends_the_watch_and_its_thread(place, faulty):
    rm = await place.connect()
    async with backend_of(rm, faulty):
        await faulty.server.until(lambda: bool(faulty.server.watches))
    async with asyncio.timeout(10):
        await faulty.server.until(lambda: not faulty.server.watches)
    assert sum("stream" in str(thread) for thread in threading.enumerate()) == 0


async def test_classes_that_mean_nothing_are_refused(place, faulty):
    from resmgr.kubernetes import KubernetesBackend, NodeClass

    rm = await place.connect()
    for classes in ([], [NodeClass("H800", {})], [NodeClass("a", {"x": "y"}), NodeClass("a", {"x": "z"})]):
        with pytest.raises(Invalid, match="at least one, with different names, each with labels"):
            KubernetesBackend(rm, classes, api=faulty.api)


def test_quantities():
    from resmgr.kubernetes_objects import quantity

    assert [quantity(text) for text in ("8", "3500m", "0.5", "1k", "2Ki")] == [8, 3.5, 0.5, 1000, 2048]
