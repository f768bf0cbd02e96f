"""The pods of one run as the API server last told of them, and what became of each. A synchronous core; `follow`
keeps it up to date.

Invariants:
- a pod is lost once and for good, with the error that says why (test_envmanager_pods.py::test_losses_have_types);
- a watch that breaks or expires costs a new listing and no event: what was missed in between shows in the listing
  (test_envmanager_pods.py::test_a_listing_tells_what_the_watch_missed).
"""

import asyncio
import logging
import random
from typing import NoReturn

from envmanager.backends.cluster import Cluster, Condition, Object, Status
from envmanager.backoff import backoff
from envmanager.errors import ClusterError, Evicted, Expired, ImagePullFailed, NodeLost, PodDied, PodLost

log = logging.getLogger(__name__)

# The node tries a failed pull again, and only then speaks of backing off: the first failure may pass.
PULL_FAILED = frozenset({"ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName"})
BROKEN_BEFORE_START = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
NODE_GONE = frozenset({"NodeLost", "NodeShutdown", "NodeNotReady", "DeletionByTaintManager", "DeletionByPodGC"})
TAKEN_AWAY = frozenset({"Evicted", "Preempting", "Preempted", "Terminated"})


class Pod:
    """One pod. `ready` is done when its server may be asked, `lost` when it must not be any more."""

    def __init__(self, name: str, uid: str = "") -> None:
        loop = asyncio.get_running_loop()
        self.name = name
        self.uid = uid
        self.ip = ""
        self.waits_for = "no node has taken it"
        self.ready = asyncio.Event()
        self.lost: asyncio.Future[PodLost] = loop.create_future()
        self.gone = asyncio.Event()

    @property
    def alive(self) -> bool:
        return self.ready.is_set() and not self.lost.done()

    def update(self, seen: Object) -> None:
        """What the API server says of it now."""
        status = seen.status
        self.uid = seen.metadata.uid or self.uid
        self.ip = status.pod_ip or self.ip
        self.waits_for = waits_for(status) or self.waits_for
        if (loss := loss_of(self.name, seen)) is not None:
            self.lose(loss)
        elif self.ip and _holds(status.conditions, "Ready"):
            self.ready.set()

    def lose(self, loss: PodLost) -> None:
        if not self.lost.done():
            self.lost.set_result(loss)


def _holds(conditions: list[Condition], type: str) -> bool:
    return any(condition.type == type and condition.status == "True" for condition in conditions)


def waits_for(status: Status) -> str:
    """Why a pod is not ready, in the cluster's words."""
    said = [(c.reason, c.message) for c in status.conditions if c.status != "True" and c.reason]
    waiting = (container.state.waiting for container in status.container_statuses)
    said += [(w.reason, w.message) for w in waiting if w is not None]
    return ": ".join(filter(None, said[-1])) if said else ""


def loss_of(name: str, seen: Object) -> PodLost | None:
    """The error of a pod that cannot serve any more, or None."""
    status = seen.status
    disrupted = [c for c in status.conditions if c.type == "DisruptionTarget" and c.status == "True"]
    reasons = {status.reason, *(condition.reason for condition in disrupted)}
    said = "; ".join(filter(None, [status.message, *(condition.message for condition in disrupted)]))
    if reasons & NODE_GONE:
        return NodeLost(f"the node of pod {name} is gone ({', '.join(filter(None, reasons))}): {said}")
    if disrupted or reasons & TAKEN_AWAY:
        return Evicted(f"pod {name} was taken away ({', '.join(filter(None, reasons))}): {said}")
    for container in status.container_statuses:
        if (waiting := container.state.waiting) is not None and waiting.reason in PULL_FAILED:
            return ImagePullFailed(f"pod {name}: {waiting.reason}: {waiting.message}")
        if waiting is not None and waiting.reason in BROKEN_BEFORE_START:
            return PodDied(f"pod {name} cannot start: {waiting.reason}: {waiting.message}")
    if status.phase in ("Failed", "Succeeded"):
        return PodDied(f"pod {name} ended: {_end_of(status)}")
    if seen.metadata.deletion_timestamp is not None:
        return PodLost(f"pod {name} was deleted by somebody else")
    return None


def _end_of(status: Status) -> str:
    ends = [c.state.terminated for c in status.container_statuses if c.state.terminated is not None]
    told = [f"{end.reason or 'exit'} {end.exit_code} {end.message}".strip() for end in ends]
    return "; ".join([*filter(None, [status.reason, status.message]), *told]) or status.phase


class Pods:
    """Those with the labels of one run. Each is known from its creation until the API server has forgotten it."""

    def __init__(self) -> None:
        self._known: dict[str, Pod] = {}
        self.changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._known)

    def expect(self, name: str) -> Pod:
        """A pod that is about to be created."""
        return self._known.setdefault(name, Pod(name))

    def forget(self, pod: Pod, loss: PodLost | None = None) -> None:
        """It is gone, or was never made."""
        if self._known.get(pod.name) is pod:
            del self._known[pod.name]
        pod.lose(loss or PodLost(f"pod {pod.name} was deleted by somebody else"))
        pod.gone.set()
        self.changed.set()

    def apply(self, type: str, seen: Object) -> None:
        """One event of a watch."""
        pod = self.expect(seen.metadata.name)
        pod.update(seen)
        if type == "DELETED":
            self.forget(pod)

    def created(self) -> list[Pod]:
        """Those that the API server has."""
        return [pod for pod in self._known.values() if pod.uid]

    def replace(self, before: list[Pod], items: list[Object]) -> None:
        """A listing: what was `created` before it was asked for, and is not in it, is gone."""
        for seen in items:
            self.apply("MODIFIED", seen)
        listed = {seen.metadata.name for seen in items}
        for pod in before:
            if pod.name not in listed:
                self.forget(pod)

    async def follow(self, cluster: Cluster, selector: str) -> NoReturn:
        """Lists, then watches from there, for ever. Waits for events; unblocked by the server's (the watch ends
        regularly, expires, or breaks: listed again then, with back-off).
        """
        failures = 0
        jitter = random.Random(0)
        while True:
            try:
                before = self.created()
                listing = await cluster.list("pod", selector)
                self.replace(before, listing.items)
                version = listing.metadata.resource_version
                while True:
                    version = await cluster.watch("pod", selector, version, self.apply)
                    failures = 0
            except Expired:
                log.info("the watch of the pods expired; listing them again")
            except ClusterError as error:
                log.warning("watching the pods: %s", error)
                await asyncio.sleep(backoff(failures, jitter, 0.2, 30.0))
                failures += 1
