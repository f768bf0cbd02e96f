"""Images on the nodes before any pod needs them: pulling dominates the resets that fail.

Invariant: it returns only when every node that was found has the image
(test_envmanager_kubernetes.py::test_prefetch_waits_for_every_node).
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from envmanager.backends.cluster import Cluster, Kind, Object
from envmanager.backends.pods import loss_of
from envmanager.backends.podspec import Owner, PodTemplate, prefetch
from envmanager.deadline import within
from envmanager.errors import ClusterError, Conflict, ImagePullFailed

log = logging.getLogger(__name__)
AGAIN_S = 1.0


def _there(seen: Object) -> bool:
    """Whether the set's controller has seen it, and all its pods run."""
    status = seen.status
    current = status.observed_generation >= seen.metadata.generation
    return current and 0 < status.desired_number_scheduled <= status.number_ready


async def prefetched(cluster: Cluster, template: PodTemplate, owner: Owner, timeout: float) -> int:
    """-> the nodes that have the image now. Made once for each run; asked again, it is only waited for."""
    manifest = prefetch(template, owner)
    with contextlib.suppress(Conflict):
        await cluster.create("daemon_set", manifest)
    return await within("prefetching the image", timeout, _awaited(cluster, owner, manifest["metadata"]["name"]))


async def _awaited(cluster: Cluster, owner: Owner, name: str) -> int:
    """Watches the set and its pods: how many there are, and whether one's image cannot be pulled."""
    done: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def apply_set(type: str, seen: Object) -> None:
        if seen.metadata.name == name and _there(seen) and not done.done():
            done.set_result(seen.status.number_ready)

    def apply_pod(type: str, seen: Object) -> None:
        loss = loss_of(seen.metadata.name, seen)
        if isinstance(loss, ImagePullFailed) and not done.done():
            done.set_exception(loss)

    selector = owner.mine("prefetch")
    watches = [
        asyncio.create_task(_watched(cluster, "daemon_set", selector, apply_set)),
        asyncio.create_task(_watched(cluster, "pod", selector, apply_pod)),
    ]
    try:
        waits: set[asyncio.Future[Any]] = {done, *watches}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for watch in watches:
            if watch.done():
                watch.result()
        return await done
    finally:
        for watch in watches:
            watch.cancel()
        await asyncio.wait(watches)


async def _watched(cluster: Cluster, kind: Kind, selector: str, apply: Callable[[str, Object], None]) -> None:
    """Lists and watches until cancelled; listed again when the watch expires, or breaks."""
    while True:
        listing = await cluster.list(kind, selector)
        for seen in listing.items:
            apply("MODIFIED", seen)
        version = listing.metadata.resource_version
        try:
            while True:
                version = await cluster.watch(kind, selector, version, apply)
        except ClusterError as error:
            log.info("watching the %s: %s", kind, error)
            await asyncio.sleep(AGAIN_S)
