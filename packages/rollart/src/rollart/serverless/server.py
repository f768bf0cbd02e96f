"""A function behind HTTP, by the contract of OpenFaaS and Knative: the body is the argument, 200 the answer.

    POST /, POST /function/NAME     the call; JSON in, JSON out, a number is answered as {"reward": number}
    GET /healthz, GET /_/health     200 while the server lives; GET /_/ready: 503 once it ends
    GET /metrics                    Prometheus

Errors are {"error": text} with 400 (no such argument), 401, 404, 413, 422 (key with another body), 429 and
Retry-After (workers and queue are full), 500 (the function raised), 502 (its process died), 503 (the server ends),
504 (timeout).

Invariants (tests/rollart/test_rollart_serverless_server.py):
- a caller that gives no key and goes away ends its call (test_a_caller_that_leaves_ends_its_call);
- when the server ends, calls under way are answered, for at most `drain` seconds (test_calls_under_way_are_answered).
"""

from __future__ import annotations

import asyncio
import hmac
import time
from types import TracebackType
from typing import Self

import msgspec
from aiohttp import web

from rollart.serverless.answers import Answers
from rollart.serverless.errors import BadFunction, Busy, Draining, ServerlessError, WorkerLost
from rollart.serverless.metrics import Calls, prometheus_text
from rollart.serverless.settings import Settings
from rollart.serverless.workers import Workers


class FunctionServer:
    """`start` it and `stop` it, or use it as an async context. `url` is where it listens."""

    def __init__(self, settings: Settings) -> None:
        self.calls = Calls()
        self.url = ""
        self._settings = settings
        self._workers = Workers(settings)
        self._answers = Answers(self._workers.call, settings.remembered)
        self._under_way = 0
        self._idle = asyncio.Event()
        self._draining = False
        self._runner: web.AppRunner | None = None

    @property
    def workers(self) -> Workers:
        return self._workers

    async def start(self) -> None:
        """Raises BadFunction when the address is taken, or the function cannot be loaded by the processes kept."""
        app = web.Application(client_max_size=self._settings.largest_body)
        app.router.add_post("/", self._called)
        app.router.add_post("/function/{name}", self._called)
        app.router.add_get("/healthz", self._health)
        app.router.add_get("/_/health", self._health)
        app.router.add_get("/_/ready", self._ready)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        try:
            await self._workers.warm()
            await self._runner.setup()
            await web.TCPSite(self._runner, self._settings.host, self._settings.port).start()
        except (OSError, WorkerLost) as error:
            await self.stop()
            raise BadFunction(f"cannot serve {self._settings.function}: {error}") from error
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    async def stop(self) -> None:
        """No further calls; waits for those under way, then ends all processes."""
        self._draining = True
        try:
            async with asyncio.timeout(self._settings.drain):
                while self._under_way:
                    self._idle.clear()
                    await self._idle.wait()
                await self._answers.settle()
        except TimeoutError:
            pass
        await self._answers.close()
        if self._runner is not None:
            await self._runner.cleanup()
        await self._workers.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _called(self, request: web.Request) -> web.Response:
        began = time.perf_counter()
        self._under_way += 1
        try:
            response = await self._answered(request)
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()
        self.calls.add(response.status, time.perf_counter() - began)
        return response

    async def _answered(self, request: web.Request) -> web.Response:
        name = request.match_info.get("name", self._settings.name)
        if not self._allowed(request):
            return _failure(401, "give the token: Authorization: Bearer TOKEN")
        if name != self._settings.name:
            return _failure(404, f"there is no function {name!r} here, but {self._settings.name!r}")
        try:
            if self._draining:
                raise Draining("the server is ending; call another one")
            body = await request.read()
            key = request.headers.get("Idempotency-Key", "")
            if not key:
                return _success(await self._workers.call(body))
            answer, again = await self._answers.get(key, body)
        except web.HTTPRequestEntityTooLarge:
            return _failure(413, f"the body is longer than {self._settings.largest_body} bytes")
        except ServerlessError as error:
            after = error.retry_after if isinstance(error, Busy) else 1 if isinstance(error, Draining) else 0
            return _failure(error.code, str(error), after)
        self.calls.replayed += again
        return _success(answer, {"Idempotent-Replayed": "true"} if again else {})

    def _allowed(self, request: web.Request) -> bool:
        given = request.headers.get("Authorization", "")
        wanted = f"Bearer {self._settings.token}"
        return not self._settings.token or hmac.compare_digest(given.encode(), wanted.encode())

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"function": self._settings.name})

    async def _ready(self, request: web.Request) -> web.Response:
        return _failure(503, "ending", 1) if self._draining else web.json_response({"function": self._settings.name})

    async def _metrics(self, request: web.Request) -> web.Response:
        if not self._allowed(request):
            return _failure(401, "give the token: Authorization: Bearer TOKEN")
        return web.Response(text=prometheus_text(self.calls, self._workers.stats()))


def _success(body: bytes, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=body, content_type="application/json", headers=headers)


def _failure(code: int, text: str, retry_after: int = 0) -> web.Response:
    headers = {"Retry-After": str(retry_after)} if retry_after else {}
    return web.Response(
        status=code, body=msgspec.json.encode({"error": text}), content_type="application/json", headers=headers
    )
