"""What the gateway answers itself: its state, trajectories' records, whole generations, and administration.

Administration fans out to all workers and answers for each; the total is not a 2xx when any of them failed
(tests/llmproxy/test_llmproxy_gateway_admin.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import msgspec
from msgspec import Struct

from llmproxy.dialects import DIALECTS
from llmproxy.errors import LLMProxyError, UpdateFailed
from llmproxy.fleet import Slot
from llmproxy.upstream import call
from llmproxy.values import Ack, GenerateRequest

from .bodies import decode
from .client import Client, Request
from .recording import of_generation
from .refusals import Refusal, Response, json_response, refusal

if TYPE_CHECKING:
    from .server import Gateway

_log = logging.getLogger(__name__)
Handler = Callable[[Request, str], Awaitable[Response]]


class _Version(Struct, forbid_unknown_fields=True):
    version: int


class _Id(Struct, forbid_unknown_fields=True):
    id: str


class _Worker(Struct, forbid_unknown_fields=True):
    url: str
    id: str = ""
    hardware: str = "any"
    dialect: str = "vllm"
    version: int = 0


class _Answer(Struct):
    """One worker's part of an administrative call."""

    worker: str
    ok: bool
    version: int | None
    digest: str = ""
    error: str = ""


class API:
    """Handlers by method and path; a path that ends in "/" takes the rest as its argument."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._routes: dict[tuple[bytes, str], Handler] = {
            (b"GET", "/health"): self._health,
            (b"GET", "/metrics"): self._metrics,
            (b"GET", "/workers"): self._workers,
            (b"GET", "/v1/models"): self._models,
            (b"POST", "/generate"): self._generate,
            (b"GET", "/trajectories"): self._trajectories,
            (b"GET", "/trajectories/"): self._trajectory,
            (b"DELETE", "/trajectories/"): self._forget,
            (b"POST", "/admin/suspend"): self._suspend,
            (b"POST", "/admin/prefetch"): self._prefetch,
            (b"POST", "/admin/update"): self._update,
            (b"POST", "/admin/resume"): self._resume,
            (b"POST", "/admin/abort"): self._abort,
            (b"POST", "/admin/interrupt"): self._interrupt,
            (b"POST", "/admin/workers"): self._add,
            (b"DELETE", "/admin/workers/"): self._remove,
        }

    def handle(self, client: Client, request: Request) -> None:
        """Answer in a task; raises Refusal when there is nothing at this path."""
        path = request.url.partition(b"?")[0].decode("latin-1")
        handler, argument = self._routes.get((request.method, path)), ""
        if handler is None:
            base, _, rest = path.rpartition("/")
            handler, argument = self._routes.get((request.method, base + "/")), unquote(rest)
        if handler is None or (path.endswith("/") and not argument):
            known = [method.decode() for method, route in self._routes if route == path]
            if known:
                raise Refusal(405, "InvalidRequest", f"{path} takes {', '.join(known)}", "method", ", ".join(known))
            raise Refusal(404, "NotFound", f"nothing is at {path[:200]}", "path", "see llmproxy serve --help")
        task = asyncio.get_running_loop().create_task(self._answer(client, request, handler, argument))
        # What administers goes on when its caller leaves: half an update is worse than an unheard answer.
        self._gateway.spawn(client, task, cancel=not path.startswith("/admin"))

    async def _answer(self, client: Client, request: Request, handler: Handler, argument: str) -> None:
        try:
            response = await handler(request, argument)
        except (LLMProxyError, Refusal) as error:
            response = self._gateway.refused(refusal(error))
        except ValueError as error:
            response = self._gateway.refused(Refusal(400, "InvalidRequest", str(error), "body", "what it takes"))
        except Exception:  # the caller is told that there was one; what it was stays here
            _log.exception("%s failed", request.url.decode("latin-1"))
            response = self._gateway.refused(Refusal(500, "InternalError", "the gateway failed; see its log"))
        client.respond(response)

    # State.

    async def _health(self, request: Request, _: str) -> Response:
        """200 while some worker serves, or all are suspended by request."""
        stats = self._gateway.proxy.stats()
        serving = sum(not worker.fenced for worker in stats.workers)
        state = {"serving": serving, "workers": len(stats.workers), "suspended": stats.suspended}
        return json_response(state, 200 if serving else 503)

    async def _metrics(self, request: Request, _: str) -> Response:
        gateway = self._gateway
        gauges = {
            "connections": gateway.connections,
            "in_flight": len(gateway.exchanges),
            "waiting": gateway.proxy.passages.waiting,
            "buffered_bytes": gateway.buffered,
            "recorded_trajectories": len(gateway.recorder) if gateway.recorder is not None else 0,
            "recorded_bytes": gateway.recorder.size if gateway.recorder is not None else 0,
        }
        body = gateway.metrics.render(gateway.proxy.stats(), gauges)
        return Response(200, body, b"text/plain; version=0.0.4; charset=utf-8")

    async def _workers(self, request: Request, _: str) -> Response:
        stats = self._gateway.proxy.stats()
        urls = {slot.id: self._gateway.worker(slot).pool.url for slot in self._gateway.proxy.workers()}
        return json_response(
            {
                "version": stats.version,
                "suspended": stats.suspended,
                "joining": sorted(self._gateway.joining),
                "workers": [msgspec.to_builtins(worker) | {"url": urls[worker.id]} for worker in stats.workers],
            }
        )

    async def _models(self, request: Request, _: str) -> Response:
        """A worker's own answer; all serve the same."""
        for slot in self._gateway.proxy.workers():
            if slot.serving:
                worker = self._gateway.worker(slot)
                answer = await call(worker.pool, "GET", "/v1/models", b"", worker.authorization)
                return Response(answer.status, answer.body)
        raise Refusal(503, "NoWorker", "no worker serves")

    # Generations that the proxy carries itself: continued when their worker is lost.

    async def _generate(self, request: Request, _: str) -> Response:
        asked: GenerateRequest = decode(GenerateRequest, request.body)
        if asked.trajectory_id in self._gateway.exchanges:
            raise Refusal(
                409, "DuplicateRequest", f"{asked.trajectory_id!r} is in flight", "trajectory_id", "one at a time"
            )
        result = await self._gateway.proxy.generate(asked)
        if self._gateway.recorder is not None:
            kept = of_generation(asked, result, request.body)
            self._gateway.recorder.keep(asked.trajectory_id, kept, self._gateway.now())
        return json_response(result)

    # Records.

    async def _trajectories(self, request: Request, _: str) -> Response:
        return json_response({"trajectories": self._recorder.ids()})

    async def _trajectory(self, request: Request, id: str) -> Response:
        turns = self._recorder.get(id)
        if turns is None:
            raise Refusal(404, "NotFound", f"nothing is recorded of trajectory {id!r}", "id", "a recorded trajectory")
        return json_response({"trajectory_id": id, "requests": turns})

    async def _forget(self, request: Request, id: str) -> Response:
        if not self._recorder.delete(id):
            raise Refusal(404, "NotFound", f"nothing is recorded of trajectory {id!r}", "id", "a recorded trajectory")
        return json_response({"deleted": id})

    @property
    def _recorder(self) -> Any:
        if self._gateway.recorder is None:
            raise Refusal(404, "NotFound", "nothing is recorded; serve with --record", "path", "a recording gateway")
        return self._gateway.recorder

    # Administration.

    async def _suspend(self, request: Request, _: str) -> Response:
        asked = self._serving()
        await self._gateway.proxy.suspend()
        for slot in asked:  # engines that cannot hold a generation over a pause: it starts again after resume
            if not self._gateway.worker(slot).dialect.keeps:
                self._gateway.proxy.passages.reclaim(slot, "its engine cannot hold generations over a pause")
        return self._states(asked)

    async def _resume(self, request: Request, _: str) -> Response:
        asked = self._serving()
        await self._gateway.proxy.resume()
        return self._states(asked)

    async def _prefetch(self, request: Request, _: str) -> Response:
        version = decode(_Version, request.body).version
        return self._acks(await self._gateway.proxy.prefetch(version))

    async def _update(self, request: Request, _: str) -> Response:
        version = decode(_Version, request.body).version
        try:
            acks = await self._gateway.proxy.update(version)
        except UpdateFailed as error:
            failed = {ack.worker for ack in error.failures}
            others = [slot.worker for slot in self._gateway.proxy.workers() if slot.id not in failed]
            acks = [*error.failures, *(Ack(one.id, one.version or 0) for one in others)]
        return self._acks(acks)

    async def _abort(self, request: Request, _: str) -> Response:
        id = decode(_Id, request.body).id
        exchange = self._gateway.find(id)
        if exchange is not None:
            worker = exchange.worker
            exchange.abort()
            return json_response({"aborted": id, "worker": worker})
        if await self._gateway.proxy.abort(id):
            return json_response({"aborted": id})
        raise Refusal(404, "NotFound", f"{id!r} is not in flight", "id", "a trajectory or request in flight")

    async def _interrupt(self, request: Request, _: str) -> Response:
        """End a request with what it has: its own answer brings that, or the answer here does for /generate."""
        id = decode(_Id, request.body).id
        exchange = self._gateway.find(id)
        if exchange is not None:
            if exchange.slot is None:
                raise Refusal(
                    409, "WrongState", f"{id!r} waits for a worker", "id", "a request at a worker; or abort it"
                )
            worker = self._gateway.worker(exchange.slot)
            await worker.end_foreign(exchange.endpoint, exchange.request.request_id)
            return json_response({"interrupted": id, "worker": exchange.worker})
        partial = await self._gateway.proxy.interrupt(id)
        if partial is None:
            raise Refusal(404, "NotFound", f"{id!r} is not in flight", "id", "a trajectory or request in flight")
        return json_response({"interrupted": id, "partial": partial})

    async def _add(self, request: Request, _: str) -> Response:
        asked: _Worker = decode(_Worker, request.body)
        if asked.dialect not in DIALECTS:
            raise Refusal(400, "InvalidRequest", f"{asked.dialect!r} is unknown", "dialect", ", ".join(DIALECTS))
        worker = await self._gateway.add(asked.url, asked.id, asked.hardware, asked.dialect, asked.version)
        return self._states([slot for slot in self._gateway.proxy.workers() if slot.worker is worker])

    async def _remove(self, request: Request, id: str) -> Response:
        """Nothing new goes there; what runs there ends there, or moves where it is paused."""
        if (waiting := self._gateway.joining.pop(id, None)) is not None:
            waiting.cancel()
            return json_response({"removed": id})
        slot = next((slot for slot in self._gateway.proxy.workers() if slot.id == id), None)
        if slot is None:
            raise Refusal(404, "NotFound", f"no worker {id!r}", "id", "one of GET /workers")
        self._gateway.proxy.remove_worker(id)
        await self._gateway.worker(slot).close()
        return json_response({"removed": id})

    def _serving(self) -> list[Slot]:
        return [slot for slot in self._gateway.proxy.workers() if slot.serving]

    def _states(self, asked: Iterable[Slot]) -> Response:
        """Whether each worker that was asked still serves."""
        fenced = {worker.id: worker.fenced for worker in self._gateway.proxy.stats().workers}
        return _told(
            [
                _Answer(slot.id, not fenced.get(slot.id), slot.worker.version, error=fenced.get(slot.id, "is gone"))
                for slot in asked
            ]
        )

    def _acks(self, acks: Iterable[Ack]) -> Response:
        return _told([_Answer(ack.worker, not ack.error, ack.version, ack.digest, ack.error) for ack in acks])


def _told(answers: list[_Answer]) -> Response:
    failed = [answer.worker for answer in answers if not answer.ok]
    status = 502 if failed or not answers else 200
    body: dict[str, Any] = {"ok": status == 200, "workers": answers}
    if status != 200:
        message = f"{len(failed)} of {len(answers)} workers failed" if answers else "no worker was there to be asked"
        body["error"] = {"message": message, "type": "WorkersFailed", "param": None, "code": status}
    return json_response(body, status)
