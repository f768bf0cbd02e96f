"""The Kubernetes API as seen from the loop: the official client, in threads. Needs the extra `kubernetes`.

Invariants:
- the loop never waits for the network: calls run in a few threads, each watch in one of its own
  (test_envmanager_kubernetes.py::test_the_loop_is_free_while_the_server_is_silent);
- what may pass is tried again a bounded number of times (no answer, 429, 5xx), and every other refusal has a type
  (test_envmanager_kubernetes.py::test_every_refusal_has_its_type);
- a cancelled watch leaves no thread (test_envmanager_kubernetes.py::test_a_closed_backend_leaves_no_thread).
"""

import asyncio
import contextlib
import itertools
import os
import random
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

import kubernetes.client
import kubernetes.config
import msgspec
import urllib3
from kubernetes.client import ApiException

from envmanager.backends.podspec import Manifest
from envmanager.backoff import backoff
from envmanager.errors import ClusterError, Conflict, Expired, InfrastructureError, Missing, QuotaExceeded

T = TypeVar("T")
# Enough for a wave of creations without being one itself: the API server throttles beyond.
THREADS = 8
CALL_S = 30.0
# The server ends each watch after this, and it is begun again from where it was; a silent one is noticed soon after.
WATCH_S = 240
FIRST_WAIT_S = 0.2
Kind = Literal["pod", "daemon_set"]


class Meta(msgspec.Struct, rename="camel"):
    """Of an object's metadata, what is looked at."""

    name: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    labels: dict[str, str] = {}
    deletion_timestamp: str | None = None


class Condition(msgspec.Struct):
    """One of a pod's conditions, such as Ready."""

    type: str
    status: str
    reason: str = ""
    message: str = ""


class Waiting(msgspec.Struct):
    """Why a container does not run yet."""

    reason: str = ""
    message: str = ""


class Terminated(msgspec.Struct, rename="camel"):
    """How a container ended."""

    exit_code: int = 0
    reason: str = ""
    message: str = ""


class ContainerState(msgspec.Struct):
    """At most one of the two; neither while it runs."""

    waiting: Waiting | None = None
    terminated: Terminated | None = None


class Container(msgspec.Struct):
    """What the node says of one container."""

    state: ContainerState = msgspec.field(default_factory=ContainerState)


class Status(msgspec.Struct, rename="camel"):
    """Of the status of a pod or of a daemon set, what is looked at."""

    phase: str = ""
    reason: str = ""
    message: str = ""
    pod_ip: str = msgspec.field(name="podIP", default="")
    conditions: list[Condition] = []
    container_statuses: list[Container] = []
    observed_generation: int = 0
    desired_number_scheduled: int = 0
    number_ready: int = 0


class Object(msgspec.Struct):
    """A pod or a daemon set."""

    metadata: Meta
    status: Status = msgspec.field(default_factory=Status)


class Listing(msgspec.Struct):
    """Objects, and the resource version at which they were so."""

    metadata: Meta
    items: list[Object] = []


class Event(msgspec.Struct):
    """One line of a watch."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: msgspec.Raw


class Refusal(msgspec.Struct):
    """The API server's own words on an error."""

    code: int = 0
    reason: str = ""
    message: str = ""


class _Passing(Exception):
    """Raised when a call failed in a way that may pass; `after` is what the server asked for, in seconds."""

    def __init__(self, reason: str, after: float = 0.0) -> None:
        super().__init__(reason)
        self.after = after


def refused(code: int, message: str) -> InfrastructureError:
    """What a status code means. A quota's refusal and a missing permission are both 403."""
    if code == 403 and "exceeded quota" in message:
        return QuotaExceeded(message)
    kinds: dict[int, type[ClusterError]] = {404: Missing, 409: Conflict, 410: Expired}
    return kinds.get(code, ClusterError)(f"the Kubernetes API answered {code}: {message}")


def _said(body: Any, otherwise: Any) -> str:
    with contextlib.suppress(msgspec.MsgspecError, TypeError):
        return msgspec.json.decode(body or b"", type=Refusal).message or str(otherwise)
    return str(otherwise)


def _raise(error: ApiException) -> None:
    """As what it is, by its status."""
    code, message = int(error.status or 0), _said(error.body, error.reason)
    if code == 0 or code == 429 or code >= 500:
        after = dict(error.headers or {}).get("Retry-After", "")
        raise _Passing(f"{code} {message}", float(after) if after.isdecimal() else 0.0)
    raise refused(code, message)


def _data(function: Callable[[], Any]) -> bytes:
    """Calls the client, in a thread."""
    try:
        return bytes(function().data)
    except ApiException as error:
        _raise(error)
        raise
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise _Passing(f"{type(error).__name__}: {error}") from error


def _configured(kubeconfig: str | None, context: str | None) -> kubernetes.client.Configuration:
    configuration = kubernetes.client.Configuration()
    try:
        if kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ:
            kubernetes.config.load_incluster_config(client_configuration=configuration)
        else:
            kubernetes.config.load_kube_config(kubeconfig, context=context, client_configuration=configuration)
    except kubernetes.config.ConfigException as error:
        raise ClusterError(f"no Kubernetes cluster is configured: {error}") from error
    return configuration


class Cluster:
    """One namespace of one cluster. `kubeconfig` and `context` choose it; by default $KUBECONFIG, ~/.kube/config, or
    the service account of the pod that this runs in.
    """

    def __init__(
        self, namespace: str, *, kubeconfig: str | None = None, context: str | None = None, retries: int = 4
    ) -> None:
        configuration = _configured(kubeconfig, context)
        configuration.connection_pool_maxsize = THREADS + 2
        configuration.retries = False
        self.namespace = namespace
        self._client = kubernetes.client.ApiClient(configuration)
        self._apis = {
            "pod": kubernetes.client.CoreV1Api(self._client),
            "daemon_set": kubernetes.client.AppsV1Api(self._client),
        }
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kubernetes")
        self._flying: set[asyncio.Future[bytes]] = set()
        self._retries = retries
        self._jitter = random.Random(0)

    async def create(self, kind: Kind, manifest: Manifest) -> Object:
        """Raises Conflict where the name exists, QuotaExceeded where there is no room."""
        return msgspec.json.decode(await self._call(kind, "create_namespaced_{}", body=manifest), type=Object)

    async def read(self, kind: Kind, name: str) -> Object:
        return msgspec.json.decode(await self._call(kind, "read_namespaced_{}", name), type=Object)

    async def delete(self, kind: Kind, name: str, uid: str, grace_s: int) -> None:
        """Of that name the object with this uid, and no later one. Gone already is deleted too."""
        body = {"gracePeriodSeconds": grace_s, "preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        with contextlib.suppress(Missing, Conflict):
            await self._call(kind, "delete_namespaced_{}", name, body=body)

    async def delete_all(self, kind: Kind, selector: str) -> None:
        await self._call(kind, "delete_collection_namespaced_{}", label_selector=selector)

    async def list(self, kind: Kind, selector: str) -> Listing:
        listed = await self._call(kind, "list_namespaced_{}", label_selector=selector)
        return msgspec.json.decode(listed, type=Listing)

    async def watch(self, kind: Kind, selector: str, since: str, apply: Callable[[str, Object], None]) -> str:
        """Gives each event to `apply(type, object)`, on the loop, until the server ends the watch. Returns the
        version to go on from. Raises Expired where `since` is forgotten.
        """
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[str] = loop.create_future()
        stop = _Stop()

        def settle(value: str, error: BaseException | None) -> None:
            if ended.done():
                return
            if error is not None:
                ended.set_exception(error)
            else:
                ended.set_result(value)

        def tell(function: Callable[..., None], *args: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody watches any more
                loop.call_soon_threadsafe(function, *args)

        def work() -> None:
            try:
                version = self._read_events(kind, selector, since, stop, lambda *event: tell(apply, *event))
            except BaseException as error:
                tell(settle, "", error)
            else:
                tell(settle, version, None)

        threading.Thread(target=work, name=f"kubernetes watch {kind}", daemon=True).start()
        try:
            return await ended
        except _Passing as error:
            raise ClusterError(f"the watch broke: {error}") from error
        finally:
            stop()

    async def close(self) -> None:
        """After it nothing of ours reaches the API."""
        await self.settled()
        await asyncio.to_thread(self._threads.shutdown)
        self._client.close()

    async def settled(self) -> None:
        """Waits for the calls that are on their way, also those whose callers were cancelled."""
        while self._flying:
            await asyncio.wait(self._flying)

    async def _call(self, kind: Kind, method: str, *args: Any, **options: Any) -> bytes:
        function = getattr(self._apis[kind], method.format(kind))
        options |= {"_preload_content": False, "_request_timeout": CALL_S}
        if "read" in method or "delete_namespaced" in method:
            args = (*args, self.namespace)
        else:
            args = (self.namespace, *args)
        for attempt in itertools.count():
            flying = asyncio.wrap_future(self._threads.submit(_data, lambda: function(*args, **options)))
            self._flying.add(flying)
            flying.add_done_callback(self._flying.discard)
            try:
                return await asyncio.shield(flying)
            except _Passing as reason:
                if attempt == self._retries:
                    raise ClusterError(f"the Kubernetes API: {reason}, after {attempt + 1} tries") from reason
                delay = max(reason.after, backoff(attempt, self._jitter, FIRST_WAIT_S, 10.0))
            await asyncio.sleep(delay)
        raise AssertionError("itertools.count ends never")

    def _read_events(
        self, kind: Kind, selector: str, since: str, stop: "_Stop", apply: Callable[[str, Object], None]
    ) -> str:
        """In the watch's thread: line after line, until the stream ends."""
        opened = getattr(self._apis[kind], f"list_namespaced_{kind}")
        options = {"watch": True, "allow_watch_bookmarks": True, "timeout_seconds": WATCH_S}
        try:
            response = opened(
                self.namespace,
                label_selector=selector,
                resource_version=since,
                _preload_content=False,
                _request_timeout=(CALL_S, WATCH_S + CALL_S),
                **options,
            )
            stop.watches(response)
            for line in response:
                event = msgspec.json.decode(line, type=Event)
                if event.type == "ERROR":
                    refusal = msgspec.json.decode(event.object, type=Refusal)
                    raise refused(refusal.code, refusal.message)
                seen = msgspec.json.decode(event.object, type=Object)
                since = seen.metadata.resource_version
                if event.type != "BOOKMARK":
                    apply(event.type, seen)
        except ApiException as error:
            _raise(error)
        except (urllib3.exceptions.HTTPError, OSError, msgspec.MsgspecError, ValueError) as error:
            raise _Passing(f"{type(error).__name__}: {error}") from error
        finally:
            stop.over()
        return since


class _Stop:
    """Ends a watch from outside: its thread reads a socket, which is shut down under it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._response: Any = None
        self._stopped = False

    def watches(self, response: Any) -> None:
        with self._lock:
            self._response = response
            if self._stopped:
                self._shut_down()

    def over(self) -> None:
        """In the thread: the response is done with."""
        with self._lock:
            response, self._response = self._response, None
        if response is not None:
            response.close()

    def __call__(self) -> None:
        with self._lock:
            self._stopped = True
            self._shut_down()

    def _shut_down(self) -> None:
        connection = getattr(self._response, "connection", None)
        if (sock := getattr(connection, "sock", None)) is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
