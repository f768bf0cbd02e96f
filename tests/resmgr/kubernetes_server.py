"""An API server with nodes and pods for the tests of the Kubernetes backend: what a real one does, and its faults.

Served from the test's own loop; the official client talks to it over HTTP from its threads. It lists, watches (with
bookmarks, from a version, 410 for one that is compacted), creates, merges patches, binds, deletes, selects by label.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Object = dict[str, Any]


class ApiServer:
    """`told` is the version up to which a watcher has been told. `compact` forgets the history, `drop` ends all
    watches, `refuse` answers so many requests with 503.
    """

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Object]] = {"nodes": {}, "pods": {}}
        self.history: list[tuple[int, str, str, Object]] = []
        self.version = 1
        self.compacted = 0
        self.refuse = 0
        self.lists = 0
        self.told = 0
        self.watches: set[asyncio.Task[Any]] = set()
        self.url = ""
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["ApiServer"]:
        app = web.Application(middlewares=[self._refusing])
        for kind, base in (("nodes", "/api/v1/nodes"), ("pods", "/api/v1/namespaces/{namespace}/pods")):
            app.router.add_get(base, self._lister(kind))
            app.router.add_post(base, self._creator(kind))
            app.router.add_delete(base, self._remover(kind))
            app.router.add_delete(base + "/{name}", self._remover(kind))
            app.router.add_patch(base + "/{name}", self._patcher(kind))
            app.router.add_patch(base + "/{name}/status", self._patcher(kind))
        app.router.add_post("/api/v1/namespaces/{namespace}/pods/{name}/binding", self._bind)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        try:
            yield self
        finally:
            self.drop()
            await runner.cleanup()

    def compact(self) -> None:
        self.compacted = self.version
        self.history.clear()

    def drop(self) -> None:
        for watch in self.watches:
            watch.cancel()

    async def bookmark(self, kind: str) -> None:
        """Tells the watchers of a kind the present version."""
        self.version += 1
        await self._record(kind, "BOOKMARK", {"metadata": {"resourceVersion": str(self.version)}})

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits for something that requests, watches and their ends may bring about."""
        async with self._changed:
            await self._changed.wait_for(holds)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    # --- requests

    @web.middleware
    async def _refusing(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.refuse:
            self.refuse -= 1
            await self._notify()
            return web.json_response({"code": 503, "message": "busy"}, status=503)
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _record(self, kind: str, change: str, found: Object) -> None:
        if change != "BOOKMARK":
            self.version += 1
            found["metadata"]["resourceVersion"] = str(self.version)
        self.history.append((self.version, kind, change, json.loads(json.dumps(found))))
        await self._notify()

    def _lister(self, kind: str) -> Any:
        async def handle(request: web.Request) -> web.StreamResponse:
            if request.query.get("watch"):
                return await self._watch(kind, request)
            self.lists += 1
            items = [o for o in self.objects[kind].values() if selected(o, request)]
            return web.json_response({"metadata": {"resourceVersion": str(self.version)}, "items": items})

        return handle

    async def _watch(self, kind: str, request: web.Request) -> web.StreamResponse:
        after = int(request.query["resourceVersion"])
        response = web.StreamResponse()
        await response.prepare(request)

        async def send(change: str, found: Object) -> None:
            await response.write(json.dumps({"type": change, "object": found}).encode() + b"\n")

        if after < self.compacted:
            await send("ERROR", {"kind": "Status", "code": 410, "message": "too old resource version"})
            return response
        task = asyncio.current_task()
        assert task is not None
        self.watches.add(task)
        await self._notify()
        seen = after
        try:
            while True:
                async with self._changed:
                    while self.version <= seen:
                        await self._changed.wait()
                for version, of, change, found in [h for h in self.history if h[0] > seen]:
                    if of == kind and (change == "BOOKMARK" or selected(found, request)):
                        await send(change, found)
                    seen = version
                seen = self.told = max(seen, self.version)
                await self._notify()
        finally:
            self.watches.discard(task)
            self._ending = asyncio.create_task(self._notify())

    def _creator(self, kind: str) -> Any:
        async def handle(request: web.Request) -> web.StreamResponse:
            body = await request.json()
            name = body["metadata"]["name"]
            if name in self.objects[kind]:
                return web.json_response({"code": 409, "reason": "AlreadyExists"}, status=409)
            body.setdefault("status", {"phase": "Pending"} if kind == "pods" else {})
            self.objects[kind][name] = body
            await self._record(kind, "ADDED", body)
            return web.json_response(body, status=201)

        return handle

    def _patcher(self, kind: str) -> Any:
        async def handle(request: web.Request) -> web.StreamResponse:
            found = self.objects[kind].get(request.match_info["name"])
            if found is None:
                return web.json_response({"code": 404, "reason": "NotFound"}, status=404)
            merge(found, await request.json())
            await self._record(kind, "MODIFIED", found)
            return web.json_response(found)

        return handle

    def _remover(self, kind: str) -> Any:
        async def handle(request: web.Request) -> web.StreamResponse:
            name = request.match_info.get("name")
            there = self.objects[kind]
            names = [n for n in ([name] if name else there) if n in there and selected(there[n], request)]
            if name and not names:
                return web.json_response({"code": 404, "reason": "NotFound"}, status=404)
            for gone in names:
                await self._record(kind, "DELETED", there.pop(gone))
            return web.json_response({"kind": "Status", "status": "Success"})

        return handle

    async def _bind(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        pod = self.objects["pods"][request.match_info["name"]]
        pod["spec"]["nodeName"] = body["target"]["name"]
        await self._record("pods", "MODIFIED", pod)
        return web.json_response({"kind": "Status", "status": "Success"}, status=201)


def selected(found: Object, request: web.Request) -> bool:
    wanted = [part.split("=") for part in request.query.get("labelSelector", "").split(",") if part]
    labels = found["metadata"].get("labels", {})
    return all(labels.get(name) == value for name, value in wanted)


def merge(found: Object, patch: Object) -> None:
    for name, value in patch.items():
        if isinstance(value, dict) and isinstance(found.get(name), dict):
            merge(found[name], value)
        else:
            found[name] = value
