"""A Kubernetes cluster for a module's tests: the double with a node agent, or with KUBECONFIG set a real API server.

On a real one the pods run as processes of this machine all the same, since they are bound to the agent's node; where
its own nodes should run them, name an image that has envmanager and the tests on its path in ENVMANAGER_TEST_IMAGE.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.envmanager.apiserver import ApiServer
from tests.envmanager.nodeagent import NodeAgent

from envmanager.backends.kubernetes import KubernetesBackend
from envmanager.backends.podspec import PodTemplate

REAL = "KUBECONFIG" in os.environ
IMAGE = os.environ.get("ENVMANAGER_TEST_IMAGE", "")


class LocalCluster(NamedTuple):
    """`api` is None on a real API server, and `agent` where its own nodes run the pods."""

    kubeconfig: str
    namespace: str
    port: int
    api: ApiServer | None
    agent: NodeAgent | None

    def template(self, env: str, **options: Any) -> PodTemplate:
        spec = {"nodeName": self.agent.name} if self.agent is not None else {}
        given: dict[str, Any] = {"image": IMAGE or "envmanager:test", "port": self.port, "spec": spec, "grace_s": 1}
        return PodTemplate(env=env, **(given | options))

    def backend(self, env: str, template: dict[str, Any] | None = None, **options: Any) -> KubernetesBackend:
        given = {"owner": f"test-{os.getpid()}", "namespace": self.namespace, "kubeconfig": self.kubeconfig}
        return KubernetesBackend(self.template(env, **(template or {})), **(given | options))

    def pods(self) -> list[str]:
        """Those of environments of this process's tests."""
        assert self.agent is not None
        return self.agent.names(f"envmanager/owner=test-{os.getpid()},envmanager/role=environment")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def cluster(folder: Path) -> Iterator[LocalCluster]:
    namespace = os.environ.get("ENVMANAGER_TEST_NAMESPACE", "default")
    api = None if REAL else ApiServer()
    if api is not None:
        api.start()
    kubeconfig = api.kubeconfig(folder / "kubeconfig") if api is not None else os.environ["KUBECONFIG"]
    agent = None if IMAGE else NodeAgent(kubeconfig, namespace, f"envmanager-test-{os.getpid()}")
    if agent is not None:
        agent.start()
    try:
        yield LocalCluster(kubeconfig, namespace, free_port() if agent is not None else 8800, api, agent)
    finally:
        if agent is not None:
            agent.stop()
        if api is not None:
            api.stop()
        if agent is not None:
            agent.join()
