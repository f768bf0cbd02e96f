"""A small Kubernetes API server for the tests: pods, daemon sets and nodes in memory, over real HTTP, with what a
client has to live with: resource versions, watches that resume, expire and send bookmarks, label and field selectors,
uid preconditions, graceful deletion, quotas, and answers that fail or never come.
"""

import asyncio
import itertools
import json
import threading
import uuid
from collections import deque
from pathlib import Path
from typing import Any

from aiohttp import web

Json = dict[str, Any]
KINDS = {"pods": "Pod", "daemonsets": "DaemonSet", "nodes": "Node"}
COUNTS = ("currentNumberScheduled", "desiredNumberScheduled", "numberMisscheduled", "numberReady")
NEW: Json = {"pods": {"phase": "Pending"}, "daemonsets": dict.fromkeys(COUNTS, 0), "nodes": {}}
BOOKMARK_S = 0.2


def matches(item: Json, labels: str, fields: str) -> bool:
    """Equality selectors: `a=b,c!=d`."""
    have = {**item["metadata"].get("labels", {})}
    where = {"spec.nodeName": item.get("spec", {}).get("nodeName", ""), "metadata.name": item["metadata"]["name"]}
    return _holds(have, labels) and _holds(where, fields)


def _holds(have: Json, selector: str) -> bool:
    for term in filter(None, selector.split(",")):
        key, _, value = term.partition("=")
        if (have.get(key.rstrip("!")) == value) == key.endswith("!"):
            return False
    return True


def merged(base: Any, patch: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(patch, dict):
        return patch
    return base | {key: merged(base.get(key), value) for key, value in patch.items()}


class ApiServer:
    """Runs on a thread of its own from `start` to `stop`; faults are set from any thread."""

    def __init__(self) -> None:
        self.quota: int | None = None
        self.failures: deque[tuple[int, Json]] = deque()  # answers to the next changes, and their headers
        self.silent = False
        self.lose_answers = 0  # so many creations are carried out, and then the connection breaks
        self.requests: deque[str] = deque(maxlen=10_000)
        self._items: dict[tuple[str, str], Json] = {}
        self._history: list[tuple[int, str, str, Json]] = []
        self._version = itertools.count(1)
        self._now = self._oldest = 0
        self._news = asyncio.Event()
        self._cuts = 0
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="api server")

    def start(self) -> str:
        self._thread.start()
        self._started.wait()
        return self.url

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def kubeconfig(self, path: Path) -> str:
        cluster = {"name": "c", "cluster": {"server": self.url}}
        context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
        user = {"name": "u", "user": {"token": "t"}}
        config = {"current-context": "c", "clusters": [cluster], "contexts": [context], "users": [user]}
        path.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", **config}))
        return str(path)

    def expire(self) -> None:
        """Forgets the past and breaks every watch: who goes on from where it was is answered 410."""
        self._loop.call_soon_threadsafe(self._expire)

    def cut_watches(self) -> None:
        self._loop.call_soon_threadsafe(self._cut)

    async def _run(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.router.add_route("*", "/api/v1/nodes{rest:.*}", self._handle)
        app.router.add_route("*", "/{root:.*}/namespaces/{ns}/{plural}", self._handle)
        app.router.add_route("*", "/{root:.*}/namespaces/{ns}/{plural}/{name}", self._handle)
        app.router.add_route("*", "/{root:.*}/namespaces/{ns}/{plural}/{name}/status", self._handle)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._started.set()
        await self._stopping.wait()
        self._cut()
        await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        plural = request.match_info.get("plural", "nodes")
        name = request.match_info.get("name", request.match_info.get("rest", "").strip("/"))
        self.requests.append(f"{request.method} {plural} {'watch' if 'watch' in request.query else ''}")
        if "watch" in request.query:
            return await self._watch(request, plural)
        if self.silent:
            await asyncio.sleep(3600)
        if self.failures and request.method in ("POST", "DELETE"):
            code, headers = self.failures.popleft()
            return _status(code, "InternalError", "told to fail", headers)
        body = await request.json() if request.can_read_body else {}
        if request.method == "POST":
            return self._create(request, plural, body)
        if not name:
            return self._collection(request, plural)
        item = self._items.get((plural, name))
        if item is None:
            return _status(404, "NotFound", f"{plural} {name!r} not found")
        if request.method == "DELETE":
            wanted = body.get("preconditions", {}).get("uid", item["metadata"]["uid"])
            if wanted != item["metadata"]["uid"]:
                return _status(409, "Conflict", f"the uid of {name} is another")
            asked = request.query.get("gracePeriodSeconds", body.get("gracePeriodSeconds", 30))
            self._delete(plural, item, int(asked))
        elif request.method in ("PATCH", "PUT"):
            based_on = body.get("metadata", {}).get("resourceVersion", item["metadata"]["resourceVersion"])
            if based_on != item["metadata"]["resourceVersion"]:
                return _status(409, "Conflict", f"{name} has been modified")
            item = self._store("MODIFIED", plural, merged(item, body))
        return web.json_response(item)

    def _create(self, request: web.Request, plural: str, body: Json) -> web.Response:
        name = body["metadata"]["name"]
        if (plural, name) in self._items:
            return _status(409, "AlreadyExists", f'{plural} "{name}" already exists')
        count = sum(kind == "pods" for kind, _ in self._items)
        if plural == "pods" and self.quota is not None and count >= self.quota:
            said = f'pods "{name}" is forbidden: exceeded quota: q, requested: pods=1, used: pods={count}'
            return _status(403, "Forbidden", said)
        status = NEW[plural]
        body["metadata"] |= {"uid": str(uuid.uuid4()), "generation": 1}
        item = self._store("ADDED", plural, {"status": status} | body)
        if plural == "pods" and self.lose_answers:
            self.lose_answers -= 1
            assert request.transport is not None
            request.transport.close()
        return web.json_response(item, status=201)

    def _collection(self, request: web.Request, plural: str) -> web.Response:
        found = self._found(plural, request)
        if request.method == "DELETE":
            for item in found:
                self._delete(plural, item, 30)
        meta = {"resourceVersion": str(self._now)}
        return web.json_response({"kind": f"{KINDS[plural]}List", "metadata": meta, "items": found})

    def _found(self, plural: str, request: web.Request) -> list[Json]:
        selectors = request.query.get("labelSelector", ""), request.query.get("fieldSelector", "")
        return [item for (kind, _), item in self._items.items() if kind == plural and matches(item, *selectors)]

    def _delete(self, plural: str, item: Json, grace: int) -> None:
        """A pod on a node ends when the node says so, or by force."""
        if plural == "pods" and grace and item["spec"].get("nodeName"):
            marked = {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}
            self._store("MODIFIED", plural, merged(item, marked))
        else:
            del self._items[plural, item["metadata"]["name"]]
            self._record("DELETED", plural, item)

    def _store(self, type: str, plural: str, item: Json) -> Json:
        item = self._record(type, plural, item)
        self._items[plural, item["metadata"]["name"]] = item
        return item

    def _record(self, type: str, plural: str, item: Json) -> Json:
        self._now = next(self._version)
        item = item | {"kind": KINDS[plural], "metadata": item["metadata"] | {"resourceVersion": str(self._now)}}
        self._history.append((self._now, type, plural, item))
        self._wake()
        return item

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _cut(self) -> None:
        self._cuts += 1
        self._wake()

    def _expire(self) -> None:
        self._now = self._oldest = next(self._version)
        self._history.clear()
        self._cut()

    async def _watch(self, request: web.Request, plural: str) -> web.StreamResponse:
        since, cuts = int(request.query.get("resourceVersion") or 0), self._cuts
        selectors = request.query.get("labelSelector", ""), request.query.get("fieldSelector", "")
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)

        async def send(type: str, item: Json) -> None:
            await response.write(json.dumps({"type": type, "object": item}).encode() + b"\n")

        if not since:  # from whatever there is
            since = self._now
            for item in self._found(plural, request):
                await send("ADDED", item)
        if since < self._oldest:
            gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
            await send("ERROR", gone)
            return response
        ends = self._loop.time() + float(request.query.get("timeoutSeconds", 3600))
        while cuts == self._cuts and self._loop.time() < ends:
            news = self._news
            for version, type, kind, item in list(self._history):
                if version > since and kind == plural and matches(item, *selectors):
                    await send(type, item)
            since = self._now
            try:
                async with asyncio.timeout(BOOKMARK_S):
                    await news.wait()
            except TimeoutError:
                await send("BOOKMARK", {"kind": KINDS[plural], "metadata": {"resourceVersion": str(since)}})
        return response


def _status(code: int, reason: str, message: str, headers: Json | None = None) -> web.Response:
    body = {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message}
    return web.json_response(body, status=code, headers=headers)
