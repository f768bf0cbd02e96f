"""Kubernetes as a backend: its nodes become pools by their labels, bindings become pods pinned to those nodes.

Invariants (tests: `test_resmgr_kubernetes.py`):
- the pools are those of the API server's nodes: a list, then a watch from its version; a version that is too old
  (410) or a broken watch is answered by a new list, so nothing is missed;
- a node that is cordoned, not ready or gone leaves its pool, and the bindings on it are granted again elsewhere;
  while the API server is away, nothing changes;
- a placement has all of its pods running, or none of them exists.

The official client blocks, so each of its calls runs in a thread; answers are decoded by msgspec, not by its models.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec
from kubernetes import client, config
from urllib3.exceptions import HTTPError

from resmgr.errors import BindTimeout, Invalid, NotPlaced
from resmgr.follower import Follower
from resmgr.kubernetes_objects import BINDING, OWNER, TOKEN, NodeObject, PodObject, quantity
from resmgr.kubernetes_watch import Gone, Watch
from resmgr.manager import ResourceManager
from resmgr.values import Binding, Node, Pool

log = logging.getLogger("resmgr")


class NodeClass(msgspec.Struct, frozen=True):
    """The nodes that carry `labels` are of class `hardware`; their units are those of `resource`."""

    hardware: str
    labels: Mapping[str, str]
    resource: str = "nvidia.com/gpu"


class Pods(msgspec.Struct, frozen=True):
    """The pods of a binding, by name: one a chunk, in the order of its allocations."""

    binding: Binding
    names: tuple[str, ...]


class KubernetesBackend:
    """The nodes of a cluster as pools `k8s-CLASS`, followed while the context lasts.

    A node belongs to the first class whose labels it has. `api` is the official client's ApiClient (default:
    KUBECONFIG, else the pod's own service account). Pods are made in `namespace`, and labelled with `owner`: one for
    each store.
    """

    def __init__(
        self,
        manager: ResourceManager,
        classes: Sequence[NodeClass],
        *,
        api: Any = None,
        namespace: str = "default",
        owner: str = "resmgr",
        retry: float = 1.0,
    ) -> None:
        names = [found.hardware for found in classes]
        if not names or len(set(names)) < len(names) or not all(found.labels for found in classes):
            raise Invalid(f"classes={names} must be at least one, with different names, each with labels")
        self._manager = manager
        self._classes = {found.hardware: found for found in classes}
        self._core = client.CoreV1Api(api or _default_api())
        self._namespace = namespace
        self._owner = owner
        self._retry = retry
        self._nodes: dict[str, NodeObject] = {}
        self._follower = Follower(manager)

    async def __aenter__(self) -> Self:
        version = await self._list()
        await self.sweep()
        self._follower.start(self._follow(version), "resmgr-kubernetes-nodes")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._follower.stop()

    # --- nodes

    async def _list(self) -> str:
        """Takes the nodes as they are now; the version from which to watch."""
        found, version = await asyncio.to_thread(NodeObject.listed, self._core.list_node)
        self._nodes = {node.name: node for node in found}
        await self._register()
        return version

    async def _follow(self, version: str) -> None:
        """Waits for changes of nodes; a change registers the pools anew, an end of the watch begins another."""
        while True:
            try:
                version = await self._watch(version)
            except Gone:
                version = await self._list_again()
            except (HTTPError, client.ApiException) as error:
                log.warning("the watch of nodes broke: %s", error)
                await asyncio.sleep(self._retry)
                version = await self._list_again()

    async def _list_again(self) -> str:
        while True:
            try:
                return await self._list()
            except (HTTPError, client.ApiException) as error:
                log.warning("nodes cannot be listed: %s", error)
            await asyncio.sleep(self._retry)

    async def _watch(self, version: str) -> str:
        async with Watch(self._core.list_node, version, NodeObject) as watch:
            async for kind, node in watch:
                if kind == "DELETED":
                    self._nodes.pop(node.name, None)
                else:
                    self._nodes[node.name] = node
                await self._register()
            return watch.version

    async def _register(self) -> None:
        for hardware, found in self._classes.items():
            pool = Pool(f"k8s-{hardware}", hardware=hardware, backend="kubernetes", nodes=self._of_class(found))
            await self._follower.register(pool)

    def _of_class(self, wanted: NodeClass) -> list[Node]:
        nodes = []
        for name, node in sorted(self._nodes.items()):
            mine = next((c for c in self._classes.values() if c.labels.items() <= node.metadata.labels.items()), None)
            total = quantity(node.status.allocatable.get(wanted.resource, "0"))
            if mine is wanted and node.usable and total > 0:
                nodes.append(Node(name, total, labels=node.metadata.labels))
        return nodes

    # --- pods

    async def place(self, binding: Binding, spec: Mapping[str, Any], timeout: float = 120.0) -> Pods:
        """Makes a pod of `spec` for each chunk, on the node that the binding has it on, and waits until all run.

        The first container is given the chunk's units, and the binding in RESMGR_BINDING, RESMGR_TOKEN, RESMGR_RANK.
        Raises BindTimeout when they do not run in time, NotPlaced when the API server refuses or a pod fails.
        """
        bodies = self._bodies(binding, spec)
        names = tuple(body["metadata"]["name"] for body in bodies)
        try:
            async with asyncio.timeout(timeout):
                for body in bodies:
                    await _whole(self._core.create_namespaced_pod, self._namespace, body)
                await self._running(binding, set(names))
        except BaseException as error:
            await self._delete(self._selector(binding))
            if isinstance(error, TimeoutError):
                raise BindTimeout(
                    f"the pods of binding {binding.id} did not run on {binding.nodes} within {timeout} s; "
                    "is the hardware used by pods that were not bound here?"
                ) from None
            if isinstance(error, ValueError):  # the client itself refuses what is no pod
                raise Invalid(f"spec={dict(spec)!r} is not a pod's: {error}") from error
            if isinstance(error, client.ApiException):
                raise NotPlaced(f"binding {binding.id}: {error.status} {error.reason}: {error.body}") from error
            raise
        return Pods(binding, names)

    async def _running(self, binding: Binding, missing: set[str]) -> None:
        selector = self._selector(binding)

        def pods(**options: Any) -> Any:
            return self._core.list_namespaced_pod(self._namespace, label_selector=selector, **options)

        while missing:
            found, version = await asyncio.to_thread(PodObject.listed, pods)
            for pod in found:
                _note(pod, missing)
            for name in missing - {pod.name for pod in found}:
                raise NotPlaced(f"pod {name} was deleted")
            try:
                await _until_running(pods, version, missing)
            except (Gone, HTTPError) as error:
                log.warning("the watch of pods broke: %s", error)
                await asyncio.sleep(self._retry)

    async def remove(self, pods: Pods) -> None:
        """Ends the pods; the binding stays."""
        await self._delete(self._selector(pods.binding))

    async def sweep(self) -> list[str]:
        """Ends the pods of bindings that are no more, such as those of an owner that died; their names."""
        live = {(b.id, str(b.token)) for b in (await self._manager.status()).bindings}

        def pods(**options: Any) -> Any:
            return self._core.list_namespaced_pod(self._namespace, label_selector=f"{OWNER}={self._owner}", **options)

        found, _ = await asyncio.to_thread(PodObject.listed, pods)
        labels = {pod.name: pod.metadata.labels for pod in found}
        orphans = [name for name, has in labels.items() if (has.get(BINDING), has.get(TOKEN)) not in live]
        for key in {labels[name].get(BINDING, "") + "," + labels[name].get(TOKEN, "") for name in orphans}:
            binding, _, token = key.partition(",")
            await self._delete(f"{OWNER}={self._owner},{BINDING}={binding},{TOKEN}={token}")
        return orphans

    async def _delete(self, selector: str) -> None:
        delete: Callable[..., Any] = self._core.delete_collection_namespaced_pod
        await asyncio.to_thread(delete, self._namespace, label_selector=selector, grace_period_seconds=0)

    def _selector(self, binding: Binding) -> str:
        return f"{OWNER}={self._owner},{BINDING}={binding.id},{TOKEN}={binding.token}"

    def _bodies(self, binding: Binding, spec: Mapping[str, Any]) -> list[dict[str, Any]]:
        if not isinstance(spec, Mapping) or not spec.get("containers"):
            raise Invalid(f"spec={spec!r} must be a pod's, with containers")
        if binding.hardware not in self._classes:
            raise Invalid(f"binding {binding.id} is on {binding.hardware}, which is none of {list(self._classes)}")
        resource = self._classes[binding.hardware].resource
        chunks = [
            (part.node, size)
            for part in binding.allocations
            for size in [min(binding.chunk, part.amount)] * round(part.amount / min(binding.chunk, part.amount))
        ]
        return [
            self._body(binding, spec, rank, node, _limit(resource, size)) for rank, (node, size) in enumerate(chunks)
        ]

    def _body(
        self, binding: Binding, spec: Mapping[str, Any], rank: int, node: str, limit: dict[str, str]
    ) -> dict[str, Any]:
        first, *others = spec["containers"]
        given = {"RESMGR_BINDING": binding.id, "RESMGR_TOKEN": str(binding.token), "RESMGR_RANK": str(rank)}
        resources = first.get("resources", {})
        container = {
            **first,
            "env": [*first.get("env", []), *({"name": name, "value": value} for name, value in given.items())],
            "resources": {part: {**resources.get(part, {}), **limit} for part in ("limits", "requests")},
        }
        pin = [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}]
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": pin}}
        role = re.sub(r"[^a-z0-9]+", "-", binding.role.lower()).strip("-") or "pod"
        return {
            "metadata": {
                "name": f"{role[:30]}-{binding.id[:12]}-{binding.token}-{rank}",
                "labels": {OWNER: self._owner, BINDING: binding.id, TOKEN: str(binding.token)},
            },
            "spec": {
                "restartPolicy": "Never",
                **spec,
                "affinity": {"nodeAffinity": required},
                "containers": [container, *others],
            },
        }


async def _whole(call: Callable[..., Any], *args: Any) -> None:
    """Waits for the thread also when cancelled, so that what it makes is there to be deleted."""
    work = asyncio.ensure_future(asyncio.to_thread(call, *args))
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.gather(work, return_exceptions=True)
        raise


async def _until_running(pods: Callable[..., Any], version: str, missing: set[str]) -> None:
    while missing:
        async with Watch(pods, version, PodObject) as watch:
            async for kind, pod in watch:
                _note(pod, missing, gone=kind == "DELETED")
                if not missing:
                    return
            version = watch.version


def _note(pod: PodObject, missing: set[str], gone: bool = False) -> None:
    if gone or pod.status.phase == "Failed":
        what = "was deleted" if gone else f"failed: {pod.status.message or pod.status.reason or 'see its log'}"
        raise NotPlaced(f"pod {pod.name} {what}")
    if pod.status.phase in ("Running", "Succeeded"):
        missing.discard(pod.name)


def _limit(resource: str, amount: float) -> dict[str, str]:
    if amount != int(amount) and resource != "cpu":
        raise Invalid(
            f"a pod takes whole units of {resource}, not {amount}; bind whole ones, or a class counted in cpu"
        )
    return {resource: f"{round(amount * 1000)}m" if resource == "cpu" else str(int(amount))}


def _default_api() -> Any:
    """The KUBECONFIG, or where there is none the service account of the pod that this runs in."""
    try:
        return config.new_client_from_config()
    except config.ConfigException:
        config.load_incluster_config()
        return client.ApiClient()
