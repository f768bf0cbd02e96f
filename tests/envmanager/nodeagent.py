"""A node for the tests: what kubelet does, over the API of any Kubernetes API server, with a process of this machine
for each pod that is bound to it, at a loopback address of its own. Faults are told to the API as the control plane
would: evictions, a lost node, images that cannot be pulled.
"""

import contextlib
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import kubernetes.client
import kubernetes.config
import kubernetes.watch
import urllib3
from kubernetes.client import ApiException

NO_IMAGE = "no-such-image"
NEVER_READY = "never-ready"
Json = dict[str, Any]


def ready(holds: bool) -> Json:
    return {"type": "Ready", "status": str(holds), "lastTransitionTime": None}


def zygote() -> "tuple[subprocess.Popen[bytes], socket.socket]":
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-P", "-m", "tests.envmanager.zygote", str(theirs.fileno())]
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=subprocess.DEVNULL, env=environ), ours


class PodProcess:
    """What runs in a pod: a process group of the zygote's making."""

    def __init__(self, orders: socket.socket, argv: list[str], environ: dict[str, str]) -> None:
        reading, writing = os.pipe()
        socket.send_fds(orders, [json.dumps({"argv": argv, "environ": environ}).encode()], [writing])
        os.close(writing)
        self._report = os.fdopen(reading, "rb", buffering=0)
        self._group = int(self._report.readline())

    @property
    def ended(self) -> bool:
        """Asked before `wait`, which takes the word."""
        return bool(select.select([self._report], [], [], 0)[0])

    def wait(self) -> int:
        """Its exit code; -SIGKILL where it was killed with its group."""
        code = self._report.readline()
        self._report.close()
        return int(code) if code else -signal.SIGKILL

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._group, signal.SIGKILL)


class NodeAgent:
    """Runs pods whose `nodeName` is its name, and daemon sets, in one namespace."""

    def __init__(self, kubeconfig: str, namespace: str, name: str) -> None:
        configuration = kubernetes.client.Configuration()
        kubernetes.config.load_kube_config(kubeconfig, client_configuration=configuration)
        self._client = kubernetes.client.ApiClient(configuration)
        self._core = kubernetes.client.CoreV1Api(self._client)
        self._apps = kubernetes.client.AppsV1Api(self._client)
        self._namespace = namespace
        self.name = name
        self._numbers = itertools.count(1)
        self._zygote, self._orders = zygote()
        self._processes: dict[str, PodProcess] = {}
        self._threads: list[threading.Thread] = []
        self._watches: list[Any] = []
        self._ended = False
        self._lock = threading.Lock()

    def start(self) -> None:
        with contextlib.suppress(ApiException):  # it is there from an earlier run
            self._core.create_node({"metadata": {"name": self.name}})
        fields = {"field_selector": f"spec.nodeName={self.name}"}
        self._follow(self._core.list_namespaced_pod, self._pod, **fields)
        self._follow(self._apps.list_namespaced_daemon_set, self._daemon_set)

    def stop(self) -> None:
        self._ended = True
        for watch in self._watches:
            watch.stop()
        for uid in list(self._processes):
            self._kill(uid)
        with contextlib.suppress(ApiException):
            self._core.delete_node(self.name)
        self._orders.close()
        self._zygote.wait()

    def join(self) -> None:
        """Waits for its watches: they end with the server, or a few seconds later by themselves."""
        for thread in self._threads:
            thread.join(10)
        self._client.close()

    @property
    def alive(self) -> int:
        """Processes of pods."""
        return len(self._processes)

    def names(self, selector: str = "") -> list[str]:
        pods = self._core.list_namespaced_pod(self._namespace, label_selector=selector).items
        return [pod.metadata.name for pod in pods]

    def evict(self, name: str) -> None:
        """As kubelet does under pressure: the process is killed and the pod stays, failed."""
        self._kill(self._core.read_namespaced_pod(name, self._namespace).metadata.uid)
        self._tell(name, phase="Failed", reason="Evicted", message="The node was low on resource: memory.")

    def lose(self, name: str) -> None:
        """As the control plane does when the node no longer answers."""
        message = "Taint manager: deleting due to NoExecute taint"
        disruption = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
        self._tell(name, conditions=[disruption | {"message": message, "lastTransitionTime": None}, ready(False)])

    def remove(self, name: str) -> None:
        """Somebody else deletes it."""
        self._core.delete_namespaced_pod(name, self._namespace, grace_period_seconds=1)

    def _follow(self, listing: Any, handle: Callable[[Any, bool], None], **options: Any) -> None:
        self._watches.append(watch := kubernetes.watch.Watch())

        def work() -> None:
            while not self._ended:
                with contextlib.suppress(ApiException, OSError, urllib3.exceptions.HTTPError):
                    for event in watch.stream(listing, self._namespace, timeout_seconds=5, **options):
                        if event["type"] != "BOOKMARK":
                            handle(event["object"], event["type"] == "DELETED")
                    if self._ended:
                        return

        self._thread(work)

    def _thread(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name="node agent", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _tell(self, name: str, **status: Any) -> None:
        with contextlib.suppress(ApiException):  # it was deleted meanwhile
            self._core.patch_namespaced_pod_status(name, self._namespace, {"status": status})

    def _pod(self, pod: Any, gone: bool) -> None:
        uid, name = pod.metadata.uid, pod.metadata.name
        with self._lock:
            known = uid in self._processes
            if not gone and pod.metadata.deletion_timestamp is None and not known and pod.status.phase == "Pending":
                self._begin(pod)
        if gone or pod.metadata.deletion_timestamp is not None:
            self._kill(uid)
        if not gone and pod.metadata.deletion_timestamp is not None:
            with contextlib.suppress(ApiException):
                self._core.delete_namespaced_pod(name, self._namespace, grace_period_seconds=0)

    def _begin(self, pod: Any) -> None:
        container, name = pod.spec.containers[0], pod.metadata.name
        waiting = {"name": container.name, "image": container.image, "imageID": "", "ready": False, "restartCount": 0}
        if container.image.startswith(NO_IMAGE):
            for reason in ("ErrImagePull", "ImagePullBackOff"):
                state = {"waiting": {"reason": reason, "message": f"{container.image}: not found"}}
                self._tell(name, containerStatuses=[waiting | {"state": state}])
            return
        number = next(self._numbers)
        ip = f"127.{64 + os.getpid() % 128}.{number // 250}.{1 + number % 250}"
        environ = {variable.name: variable.value or ip for variable in container.env or []}
        command = [part.replace("$(POD_IP)", ip) for part in container.command]
        if command[0] != "envmanager":
            self._tell(
                name, phase="Running", podIP=ip, conditions=[ready(True)]
            )  # it holds an image, and does nothing
            return
        process = self._processes[pod.metadata.uid] = PodProcess(self._orders, command[1:], environ)
        self._thread(lambda: self._run(pod, process, ip))

    def _run(self, pod: Any, process: PodProcess, ip: str) -> None:
        """From the process's start to its end."""
        container, name = pod.spec.containers[0], pod.metadata.name
        probe = container.readiness_probe
        self._tell(name, phase="Running", podIP=ip, podIPs=[{"ip": ip}], conditions=[ready(False)])
        if not container.image.startswith(NEVER_READY):
            healthy = probe is None or _healthy(process, f"http://{ip}:{probe.http_get.port}/health")
            self._tell(name, conditions=[ready(healthy)])
        code = process.wait()
        if self._processes.pop(pod.metadata.uid, None) is None:
            return  # it was killed by order
        ended = {"terminated": {"exitCode": code % 256, "reason": "Error"}}
        status = {"name": container.name, "image": container.image, "imageID": "", "ready": False, "restartCount": 0}
        self._tell(name, phase="Failed", conditions=[ready(False)], containerStatuses=[status | {"state": ended}])

    def _kill(self, uid: str) -> None:
        process = self._processes.pop(uid, None)
        if process is not None:
            process.kill()

    def _daemon_set(self, seen: Any, gone: bool) -> None:
        """As its controller would where this node is the only one, and the garbage collector."""
        if gone:
            labels = ",".join(f"{key}={value}" for key, value in seen.spec.template.metadata.labels.items())
            self._core.delete_collection_namespaced_pod(self._namespace, label_selector=labels)
            return
        if seen.status is not None and seen.status.observed_generation:
            return
        meta, spec = seen.metadata, seen.spec.template
        labels, name = spec.metadata.labels, f"{meta.name}-{self.name}"
        pod = {
            "metadata": {"name": name, "labels": labels},
            "spec": self._client.sanitize_for_serialization(spec.spec),
        }
        status = {"observedGeneration": meta.generation, "desiredNumberScheduled": 1, "currentNumberScheduled": 1}
        with contextlib.suppress(ApiException):
            self._core.create_namespaced_pod(self._namespace, pod | {"spec": pod["spec"] | {"nodeName": self.name}})
        runs = 0 if spec.spec.containers[0].image.startswith(NO_IMAGE) else 1
        whole = status | {"numberMisscheduled": 0, "numberReady": runs}
        self._apps.patch_namespaced_daemon_set_status(meta.name, self._namespace, {"status": whole})


def _healthy(process: PodProcess, url: str) -> bool:
    """Asks as kubelet's readiness probe does, only sooner."""
    while not process.ended:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            threading.Event().wait(0.02)
    return False
