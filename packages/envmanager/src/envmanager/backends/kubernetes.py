"""Environments in pods: one for each environment, from a template, reached over HTTP. Needs the extras `kubernetes`
and `http`.

Invariants:
- a call to a pod ends when the pod is lost, with the error that says how, and not only when the network gives up
  (test_envmanager_kubernetes.py::test_a_lost_pod_ends_the_call_that_waits_for_it);
- a pod serves one episode, or with `reuse` another after a clean close; after anything else it is deleted
  (test_envmanager_kubernetes.py::test_a_pod_serves_again_only_when_clean).
"""

import asyncio
import secrets
from collections.abc import Coroutine
from typing import Any, Self

from envmanager.backends.cluster import Cluster
from envmanager.backends.http import HTTPEnv, headers_of
from envmanager.backends.podpool import PodPool, PodStats
from envmanager.backends.pods import Pod
from envmanager.backends.podspec import Owner, PodTemplate
from envmanager.backends.prefetch import prefetched
from envmanager.errors import InfrastructureError
from envmanager.posting import Posts

# A pod that answers no more is lost as a rule, and the watch says so within moments: wait for its word.
NEWS_S = 2.0


class KubernetesBackend:
    """A factory of environments in pods of one namespace. Use it as an async context: entering sweeps what earlier
    runs of the same `owner` left and begins to warm up, leaving deletes every pod.

    `owner` names who runs this, and no two that run at once share it. `warm` pods are kept ready beside those in use.
    A pod has `start_s` seconds to become ready; give `Limits.reset_timeout` more. `options` choose the cluster:
    kubeconfig, context.
    """

    blocking = False

    def __init__(
        self,
        template: PodTemplate,
        *,
        owner: str,
        namespace: str = "default",
        warm: int = 0,
        reuse: bool = False,
        start_s: float = 240.0,
        poll_s: float = 60.0,
        **options: Any,
    ) -> None:
        if warm < 0 or start_s <= 0:
            raise ValueError(f"warm is {warm} and start_s is {start_s}; use at least 0, and positive seconds")
        token = secrets.token_urlsafe(24)
        self._template = template
        self._owner = Owner.new(owner)
        self._cluster = Cluster(namespace, **options)
        self._pool = PodPool(self._cluster, template, self._owner, token, warm=warm, start_s=start_s)
        self._reuse = reuse
        self._posts = Posts(
            "",
            InfrastructureError,
            timeout=poll_s,
            retries=3,
            concurrency=1 << 16,  # one for each pod; the cluster is the bound
            headers=headers_of(token, poll_s),
            first_wait=0.2,
        )

    def __call__(self, key: str) -> "PodEnv":
        return PodEnv(self._pool, self._posts, key, self._template.port, self._reuse)

    def stats(self) -> PodStats:
        return self._pool.stats

    async def prefetch(self, timeout: float = 1800.0) -> int:
        """Pulls the image on every node where the pods may run, and holds it there until the backend is closed.
        -> the nodes. Raises ImagePullFailed, or DeadlineExceeded.
        """
        return await prefetched(self._cluster, self._template, self._owner, timeout)

    async def __aenter__(self) -> Self:
        try:
            await self._pool.open()
        except BaseException:
            await self._cluster.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Deletes every pod, and waits until none is left. Raises ClusterError where that cannot be asked."""
        await self._posts.close()
        try:
            await self._pool.close()
        finally:
            await self._cluster.close()


class PodEnv:
    """One episode's environment in a pod."""

    def __init__(self, pool: PodPool, posts: Posts, key: str, port: int, reuse: bool) -> None:
        self._pool = pool
        self._posts = posts
        self._key = key
        self._port = port
        self._reuse = reuse
        self._pod: Pod | None = None
        self._env: HTTPEnv
        self._clean = True

    @property
    def task(self) -> str:
        return self._env.task

    async def reset(self, seed: int | None = None) -> Any:
        pod = self._pod = await self._pool.take()
        self._env = HTTPEnv(self._posts, self._key, f"http://{pod.ip}:{self._port}")
        return await self._asked(pod, self._env.reset(seed))

    async def step(self, action: str) -> Any:
        assert self._pod is not None
        return await self._asked(self._pod, self._env.step(action))

    async def close(self) -> None:
        """Closes where the pod may serve again, then gives it back."""
        pod, self._pod = self._pod, None
        if pod is None:
            return
        again = False
        try:
            if self._reuse and self._clean:
                await self._asked(pod, self._env.close())
                again = self._clean
        finally:
            self._pool.give_back(pod, again)

    async def _asked(self, pod: Pod, call: Coroutine[Any, Any, Any]) -> Any:
        """The call's result, or why the pod cannot give one any more."""
        clean, self._clean = self._clean, False  # until it has answered: what is cancelled stays unclean
        calling = asyncio.create_task(call)
        try:
            await asyncio.wait({calling, pod.lost}, return_when=asyncio.FIRST_COMPLETED)
            if not calling.done() or isinstance(calling.exception(), InfrastructureError):
                await asyncio.wait({pod.lost}, timeout=NEWS_S)
                if pod.lost.done():
                    raise pod.lost.result() from (calling.exception() if calling.done() else None)
        finally:
            if not calling.done():
                calling.cancel()
                await asyncio.wait({calling})
        result = calling.result()
        self._clean = clean
        return result
