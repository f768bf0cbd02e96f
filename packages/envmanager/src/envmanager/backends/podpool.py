"""Pods that serve one caller at a time: some are kept ready, the others are made when asked for.

Invariants:
- every pod that was created is deleted, whatever happened to whoever asked for it; after `close` none is left
  (test_envmanager_kubernetes.py::test_a_cancelled_start_leaves_no_pod);
- what earlier runs of the same owner left is deleted first
  (test_envmanager_kubernetes.py::test_orphans_are_swept_and_foreign_pods_are_not);
- a full quota is waited for, as long as the caller waits (test_envmanager_kubernetes.py::test_a_full_quota).
"""

import asyncio
import contextlib
import logging
import random
from collections import deque
from collections.abc import Coroutine
from typing import Any

import msgspec

from envmanager.backends.cluster import Cluster
from envmanager.backends.pods import Pod, Pods
from envmanager.backends.podspec import RUN, Owner, PodTemplate, pod
from envmanager.backoff import backoff
from envmanager.errors import ClusterError, Conflict, Missing, PodLost, QuotaExceeded, RolloutError

log = logging.getLogger(__name__)

# Deletions that are still on their way at the end are waited for so long beyond the pods' own grace.
LEAVE_S = 30.0


class PodStats(msgspec.Struct):
    """Pods `created` and `deleted`, takers that found one `ready`, how often a quota was `full`; `orphans` swept;
    pods `lost`, by the name of their error.
    """

    created: int = 0
    deleted: int = 0
    ready: int = 0
    full: int = 0
    orphans: int = 0
    lost: dict[str, int] = {}


class PodPool:
    """Keeps `warm` pods ready beside those in use. `start_s` bounds a pod's way to readiness."""

    def __init__(
        self, cluster: Cluster, template: PodTemplate, owner: Owner, token: str, *, warm: int, start_s: float
    ) -> None:
        self.stats = PodStats()
        self._cluster = cluster
        self._template = template
        self._owner = owner
        self._token = token
        self._warm = warm
        self._start_s = start_s
        self._pods = Pods()
        self._spares: deque[asyncio.Task[Pod]] = deque()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._following: asyncio.Task[Any]
        self._jitter = random.Random(0)
        self._used = 0
        self._closing = False

    async def open(self) -> None:
        """Sweeps what earlier runs left, then begins to watch and to warm up."""
        orphans = await self._cluster.list("pod", self._owner.orphans)
        await self._cluster.delete_all("daemon_set", self._owner.orphans)
        if orphans.items:
            log.warning("deleting %d pods that earlier runs of %s left", len(orphans.items), self._owner.name)
            self.stats.orphans += len(orphans.items)
            await self._cluster.delete_all("pod", self._owner.orphans)
        self._following = asyncio.create_task(self._pods.follow(self._cluster, self._owner.mine("environment")))
        self._fill()

    async def take(self) -> Pod:
        """One that is ready. It must be given back. Raises PodLost or ClusterError when none comes to be."""
        spare = self._best()
        self.stats.ready += spare is not None and spare.done()
        starting = spare or self._own(self._started())
        self._fill()
        try:
            taken = await asyncio.shield(starting)
        except asyncio.CancelledError:
            if not self._closing:
                self._spares.append(starting)  # it goes on, for somebody else
                self._trim()
            raise
        self._used += 1
        return taken

    def give_back(self, pod: Pod, again: bool) -> None:
        """Keeps it ready for the next taker where it may serve `again`, else deletes it. So many are kept as are in
        use beside it: whoever used it is likely to come again.
        """
        if self._closing:
            return
        if again and pod.alive:
            self._spares.append(self._own(_itself(pod)))
            self._trim()
        else:
            self._own(self._deleted(pod))
        self._used -= 1

    async def close(self) -> None:
        """Deletes every pod, and returns when none is left."""
        self._closing = True
        self._spares.clear()
        await _ended(self._tasks)
        await self._cluster.settled()
        try:
            await self._cluster.delete_all("daemon_set", self._owner.mine("prefetch"))
            await self._cluster.delete_all("pod", self._owner.mine("environment"))
            await self._left()
        finally:
            await _ended({self._following})

    async def _left(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._template.grace_s + LEAVE_S):
                while len(self._pods):
                    self._pods.changed.clear()
                    await self._pods.changed.wait()
                return
        log.warning("%d pods of run %s have not ended yet", len(self._pods), self._owner.run)

    def _best(self) -> asyncio.Task[Pod] | None:
        """A spare that is ready, else one on its way; the lost and failed are dropped."""
        usable: deque[asyncio.Task[Pod]] = deque()
        for spare in self._spares:
            if not spare.done() or (spare.exception() is None and spare.result().alive):
                usable.append(spare)
            elif spare.exception() is None:
                self._own(self._deleted(spare.result()))
        self._spares = usable
        chosen = next((spare for spare in usable if spare.done()), usable[0] if usable else None)
        if chosen is not None:
            usable.remove(chosen)
        return chosen

    def _fill(self) -> None:
        while len(self._spares) < self._warm:
            self._spares.append(self._own(self._started()))

    def _trim(self) -> None:
        """More than are wanted: those that are ready are deleted, those on their way when they are."""
        while len(self._spares) > max(self._warm, self._used):
            self._own(self._unwanted(self._spares.pop()))

    async def _unwanted(self, starting: asyncio.Task[Pod]) -> None:
        with contextlib.suppress(RolloutError):
            await self._deleted(await starting)

    async def _started(self) -> Pod:
        """Creates a pod and waits until it is ready, or lost."""
        deadline = asyncio.get_running_loop().time() + self._start_s
        made = await self._created(deadline)
        try:
            await self._readiness(made, deadline)
        except RolloutError:
            self._own(self._deleted(made))
            raise
        return made

    async def _readiness(self, made: Pod, deadline: float) -> None:
        ready = asyncio.create_task(made.ready.wait())
        left = deadline - asyncio.get_running_loop().time()
        waits: set[asyncio.Future[Any]] = {ready, made.lost, self._following}
        try:
            await asyncio.wait(waits, timeout=max(left, 0.0), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if made.lost.done():
            raise made.lost.result()
        if self._following.done():
            raise ClusterError(f"nobody watches the pods any more: {self._following.exception()!r}")
        if not made.ready.is_set():
            raise PodLost(f"pod {made.name} was not ready within {self._start_s} s: {made.waits_for}")

    async def _created(self, deadline: float) -> Pod:
        """Asks for a pod until there is room for it. What is on its way to the API is never cut short: it would be
        created, and nobody would know.
        """
        attempt = 0
        while True:
            manifest = pod(self._template, self._owner, self._token)
            expected = self._pods.expect(manifest["metadata"]["name"])
            try:
                expected.update(await self._cluster.create("pod", manifest))
            except QuotaExceeded as full:
                self._pods.forget(expected)
                self.stats.full += 1
                left = deadline - asyncio.get_running_loop().time()
                if left <= 0:
                    raise
                log.info("no room for another pod: %s", full)
                await self._room(min(left, backoff(attempt, self._jitter)))
                attempt += 1
                continue
            except Conflict:
                if not await self._is_ours(expected):
                    continue
            except ClusterError:
                self._pods.forget(expected)
                raise
            self.stats.created += 1
            return expected

    async def _is_ours(self, expected: Pod) -> bool:
        """A name that exists was taken by our own try whose answer was lost, or by somebody else."""
        with contextlib.suppress(Missing):
            found = await self._cluster.read("pod", expected.name)
            if found.metadata.labels.get(RUN) == self._owner.run:
                expected.update(found)
                return True
        self._pods.forget(expected)
        return False

    async def _room(self, seconds: float) -> None:
        """Until one of our pods is gone, or some time has passed: others' may be gone too."""
        self._pods.changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._pods.changed.wait()

    async def _deleted(self, pod: Pod) -> None:
        if pod.lost.done():
            kind = type(pod.lost.result()).__name__
            self.stats.lost[kind] = self.stats.lost.get(kind, 0) + 1
        try:
            await self._cluster.delete("pod", pod.name, pod.uid, self._template.grace_s)
            self.stats.deleted += 1
        except ClusterError as error:
            log.warning("pod %s is not deleted yet, but will be at the end: %s", pod.name, error)

    def _own(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.info("a pod: %s", error)


async def _itself(pod: Pod) -> Pod:
    return pod


async def _ended(tasks: set[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
