"""What a pod's status means, and what a view of pods makes of events and listings."""

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.envmanager.fakes import virtual

pytest.importorskip("kubernetes", reason="the extra `kubernetes` is not installed")

from envmanager import ClusterError, Evicted, ImagePullFailed, NodeLost, PodDied, PodLost
from envmanager.backends.cluster import Listing, Meta, Object
from envmanager.backends.pods import Pod, Pods, loss_of, waits_for
from envmanager.backends.podspec import Owner
from envmanager.backends.prefetch import _awaited


def seen(name: str = "p", deleted: bool = False, **status: Any) -> Object:
    meta = {"name": name, "uid": f"uid-{name}", "deletionTimestamp": "2026-01-01T00:00:00Z" if deleted else None}
    return msgspec.convert({"metadata": meta, "status": status}, Object)


def waiting(reason: str) -> list[dict[str, Any]]:
    return [{"state": {"waiting": {"reason": reason, "message": "m"}}}]


def disrupted(reason: str) -> list[dict[str, Any]]:
    return [{"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "m"}]


ENDED = [{"state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}]
READY = [{"type": "Ready", "status": "True"}]


@pytest.mark.parametrize(
    ("status", "deleted", "kind", "said"),
    [
        ({"containerStatuses": waiting("ImagePullBackOff")}, False, ImagePullFailed, "ImagePullBackOff: m"),
        ({"containerStatuses": waiting("InvalidImageName")}, False, ImagePullFailed, "InvalidImageName"),
        ({"containerStatuses": waiting("CreateContainerConfigError")}, False, PodDied, "cannot start"),
        ({"phase": "Failed", "reason": "Evicted", "message": "disk"}, False, Evicted, "disk"),
        ({"phase": "Failed", "reason": "Preempting"}, False, Evicted, "Preempting"),
        ({"phase": "Running", "conditions": disrupted("EvictionByEvictionAPI")}, True, Evicted, "EvictionByEviction"),
        ({"phase": "Running", "conditions": disrupted("DeletionByTaintManager")}, True, NodeLost, "TaintManager"),
        ({"phase": "Failed", "reason": "NodeLost"}, False, NodeLost, "NodeLost"),
        ({"phase": "Failed", "reason": "NodeShutdown"}, False, NodeLost, "NodeShutdown"),
        ({"phase": "Failed", "containerStatuses": ENDED}, False, PodDied, "OOMKilled 137"),
        ({"phase": "Failed", "reason": "DeadlineExceeded"}, False, PodDied, "DeadlineExceeded"),
        ({"phase": "Succeeded"}, False, PodDied, "Succeeded"),
        ({"phase": "Running"}, True, PodLost, "deleted by somebody else"),
    ],
)
def test_losses_have_types(status, deleted, kind, said):
    loss = loss_of("p", seen(deleted=deleted, **status))
    assert type(loss) is kind and said in str(loss)


@pytest.mark.parametrize(
    "status",
    [
        {"phase": "Pending"},
        {"phase": "Running", "conditions": [{"type": "Ready", "status": "False", "reason": "ContainersNotReady"}]},
        {"containerStatuses": waiting("ErrImagePull")},  # the node tries again
        {"containerStatuses": waiting("ContainerCreating")},
    ],
)
def test_what_may_still_come_is_no_loss(status):
    assert loss_of("p", seen(**status)) is None


def test_why_a_pod_waits():
    unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    assert waits_for(seen(conditions=[unschedulable]).status) == "Unschedulable: 0/3 nodes"
    assert waits_for(seen(conditions=READY).status) == ""


def test_a_pod_is_ready_with_its_address_and_lost_for_good():
    async def scenario() -> None:
        pods = Pods()
        pod = pods.expect("p")
        pods.apply("ADDED", seen(phase="Pending"))
        pods.apply("MODIFIED", seen(phase="Running", conditions=READY))
        assert not pod.ready.is_set()  # nobody can reach it yet
        pods.apply("MODIFIED", seen(phase="Running", conditions=READY, podIP="10.0.0.1"))
        assert pod.alive and pod.ip == "10.0.0.1"
        pods.apply("MODIFIED", seen(phase="Failed", reason="Evicted"))
        pods.apply("MODIFIED", seen(phase="Running", conditions=READY))
        assert not pod.alive and type(pod.lost.result()) is Evicted
        pods.apply("DELETED", seen(phase="Failed"))
        assert pod.gone.is_set() and not len(pods)

    virtual(scenario())


def test_a_listing_tells_what_the_watch_missed():
    async def scenario() -> None:
        pods = Pods()
        there, gone = pods.expect("a"), pods.expect("b")
        for name in "ab":
            pods.apply("ADDED", seen(name, phase="Running", conditions=READY, podIP="10.0.0.1"))
        before = pods.created()
        new = pods.expect("c")
        pods.apply("ADDED", seen("c"))  # created while the listing was on its way
        pods.replace(before, [seen("a", phase="Running")])
        assert there.alive and gone.gone.is_set() and "somebody else" in str(gone.lost.result())
        assert not new.lost.done() and len(pods) == 2

    virtual(scenario())


def test_prefetching_goes_on_when_a_watch_breaks():
    class Breaking:
        """Its first two watches break; the next sees the set complete."""

        watches = 0

        async def list(self, kind: str, selector: str) -> Listing:
            return Listing(Meta(resource_version="1"))

        async def watch(self, kind: str, selector: str, since: str, apply: Any) -> str:
            self.watches += 1
            if self.watches <= 2:
                raise ClusterError("the watch broke")
            apply("MODIFIED", seen("set", desiredNumberScheduled=3, numberReady=3))
            await asyncio.sleep(1e6)
            return since

    cluster: Any = Breaking()
    assert virtual(_awaited(cluster, Owner.new("me"), "set")) == 3


events = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from(["Pending", "Running", "Failed", "DELETED"])), max_size=20
)


@given(events)
def test_a_lost_pod_stays_lost(events):
    async def scenario() -> None:
        pods = Pods()
        held: dict[str, Pod] = {}
        for name, phase in events:
            pod = held[name] = pods.expect(name) if phase != "DELETED" else held.get(name, pods.expect(name))
            lost = pod.lost.done()
            pods.apply("DELETED" if phase == "DELETED" else "MODIFIED", seen(name, phase=phase, podIP="1.1.1.1"))
            assert pod.lost.done() == (lost or phase in ("Failed", "DELETED"))
            assert pod.gone.is_set() == (phase == "DELETED") and (name in pods._known) != pod.gone.is_set()

    virtual(scenario())
