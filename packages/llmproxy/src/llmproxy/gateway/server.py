"""The gateway: a server in front of HTTP workers, with the routing, gate and fence of an `LLMProxy`.

Requests to the engines' endpoints pass as bytes (`exchange.py`); everything else is answered here (`api.py`).

Invariants (tests/llmproxy/test_llmproxy_gateway.py):
- an id, of a trajectory or a request, has one request in flight;
- what is held for requests, and counted for them, is given back when they end, however they end;
- a worker is fenced by failing to answer, or by `breaker` server errors in a row; never by a 4xx;
- once draining, no request begins; those under way end, or are cut off at the deadline.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import socket
from collections.abc import Callable
from typing import cast

from llmproxy.dialects import DIALECTS
from llmproxy.errors import DuplicateRequest, LLMProxyError
from llmproxy.fleet import Slot
from llmproxy.http_worker import HTTPWorker
from llmproxy.proxy import LLMProxy
from llmproxy.values import GenerateRequest

from .api import API
from .bodies import Facts, read
from .client import Client, Request
from .config import GatewayConfig
from .exchange import Exchange
from .metrics import Metrics
from .recording import Kept, Recorder
from .refusals import Refusal, Response, refusal

_log = logging.getLogger(__name__)

ENDPOINTS = (b"/v1/completions", b"/v1/chat/completions", b"/inference/v1/generate")
"""Passed on to workers."""
_BYTES_A_TOKEN = 4
"""Of a body that is not read, about; used to weigh requests against each other."""
_JOIN_FIRST, _JOIN_LONGEST = 0.2, 5.0
"""Delays between attempts to reach a worker that has not answered yet."""
MakeWorker = Callable[[str, str, str, str, int], HTTPWorker]
"""(url, id, hardware, dialect, version) to a worker."""
_SWEEP = 0.5
"""Seconds between looks at deadlines, and the grain of the clock that they are set by."""


class Gateway:
    """Serve `proxy`, all of whose workers are HTTPWorkers. `await start()`, later `await close()`."""

    def __init__(
        self,
        proxy: LLMProxy,
        config: GatewayConfig = GatewayConfig(),  # noqa: B008 - immutable
        make_worker: MakeWorker | None = None,
    ) -> None:
        """`make_worker` makes those that are added later, by default without a loader."""
        self.proxy = proxy
        self.make_worker = make_worker or _make_worker
        self.config = config
        self.metrics = Metrics()
        self.recorder = Recorder(config) if config.record else None
        self.buffered = 0
        """Bytes of request bodies that are held."""
        self.joining: dict[str, asyncio.Task[None]] = {}
        """Workers that have not answered yet, and what waits for them."""
        self.draining = False
        self.clock = 0.0
        self.exchanges: dict[str, Exchange] = {}
        """In flight, by trajectory, or by request where there is no trajectory."""
        self.by_request: dict[str, Exchange] = {}
        self._api = API(self)
        self._clients: set[Client] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._empty: asyncio.Future[None] | None = None
        self._errors: dict[Slot, int] = {}
        self._marks: dict[tuple[str, int], bytes] = {}
        self._loop: asyncio.AbstractEventLoop = cast("asyncio.AbstractEventLoop", None)
        self._origin = os.urandom(4).hex()
        self._number = 0
        self._key = f"Bearer {config.api_key}".encode() if config.api_key else b""
        self._token = f"Bearer {config.admin_token}".encode() if config.admin_token else b""

    # Life.

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listen; the port."""
        self._loop = asyncio.get_running_loop()
        self._sweep()
        for slot in self.proxy.workers():
            self.watch(slot)
        self._server = await self._loop.create_server(lambda: Client(self), host, port, backlog=1024)
        return int(self._server.sockets[0].getsockname()[1])

    async def drain(self, deadline: float) -> None:
        """Take no more requests; wait for those under way, `deadline` seconds at most."""
        self.draining = True
        if self._server is not None:
            self._server.close()
        for client in list(self._clients):
            client.drain()
        if self._clients:
            self._empty = self._loop.create_future()
            try:
                async with asyncio.timeout(deadline):
                    await self._empty
            except TimeoutError:
                _log.warning("%d connections are cut off after %s s", len(self._clients), deadline)

    async def close(self) -> None:
        """End everything now. The proxy and its workers are their owner's."""
        self.draining = True
        if self._server is not None:
            self._server.close()
        for client in list(self._clients):
            client.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._sweeper is not None:
            self._sweeper.cancel()
        await asyncio.sleep(0)  # connections that were aborted report it in the loop's next turn

    @property
    def connections(self) -> int:
        return len(self._clients)

    def now(self) -> float:
        return self._loop.time()

    def _sweep(self) -> None:
        self.clock = now = self._loop.time()
        self._sweeper = self._loop.call_later(_SWEEP, self._sweep)
        for client in [client for client in self._clients if client.deadline < now]:
            client.expired()
        if self.recorder is not None:
            self.recorder.forget_old(now)

    # Connections.

    def joined(self, client: Client) -> None:
        self._clients.add(client)
        sock = client.transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self._clients) > self.config.max_connections:
            limit = f"at most {self.config.max_connections} connections"
            client.turn_away(Refusal(503, "Overloaded", "the gateway has too many connections", "connection", limit))

    def left(self, client: Client) -> None:
        self._clients.discard(client)
        if self._empty is not None and not self._clients and not self._empty.done():
            self._empty.set_result(None)

    def admit(self, client: Client, request: Request) -> None:
        """A head has arrived: raise Refusal before the body does. Keys are compared in constant time."""
        if self.draining:
            raise Refusal(503, "Draining", "the gateway is shutting down")
        path = request.url.partition(b"?")[0]
        if path.startswith(b"/admin"):
            self._admit_admin(client, request)
        elif self._key and path != b"/health" and not hmac.compare_digest(request.authorization, self._key):
            raise Refusal(401, "Unauthorized", "a valid API key is needed", "authorization", "Bearer KEY")
        if path in ENDPOINTS and request.method != b"POST":
            raise Refusal(405, "InvalidRequest", f"{path.decode()} takes POST", "method", "POST")

    def _admit_admin(self, client: Client, request: Request) -> None:
        if request.origin:  # a web page's script, which may reach this host although its author may not
            raise Refusal(403, "Forbidden", "web pages may not administer the gateway", "origin", "absent")
        if self._token:
            if not hmac.compare_digest(request.authorization, self._token):
                raise Refusal(401, "Unauthorized", "the admin token is needed", "authorization", "Bearer TOKEN")
        elif not client.loopback:
            raise Refusal(403, "Forbidden", "without an admin token, only this host may", "address", "loopback")

    def handle(self, client: Client, request: Request) -> None:
        """A request has arrived whole."""
        path = request.url
        if path not in ENDPOINTS and path.partition(b"?")[0] not in ENDPOINTS:
            self._api.handle(client, request)
            return
        exchange = client.exchange = self._exchange(client, request, path.partition(b"?")[0])
        self.proxy.passages.enter(exchange)

    def spawn(self, client: Client, task: asyncio.Task[None], *, cancel: bool) -> None:
        """Own a task that answers a request; `cancel` it when the client goes away."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if cancel:
            client.task = task

    def refused(self, error: Refusal) -> Response:
        self.metrics.refused[error.type] += 1
        return Response(error.status, error.body())

    # Requests on their way.

    def _exchange(self, client: Client, request: Request, path: bytes) -> Exchange:
        try:
            facts = self._facts(request, path)
            request_id = request.request_id.decode() or self._next_id()
            name = facts.trajectory_id or request_id
            routed = GenerateRequest(name, facts.prompt_ids, facts.tokens, facts.task, request_id=request_id)
            if name in self.exchanges or self.proxy.in_flight(name):
                raise DuplicateRequest("trajectory_id", f"{name!r} has a request in flight", "one at a time")
            if request_id in self.by_request:
                raise DuplicateRequest("request_id", f"{request_id!r} is in flight", "unique")
        except LLMProxyError as error:
            raise refusal(error) from None
        body = request.body
        if self.recorder is not None and facts.trajectory_id:
            body = self.recorder.asking(path, body)
        exchange = Exchange(self, client, path.decode(), request, routed, body, bool(facts.trajectory_id))
        self.exchanges[name] = self.by_request[request_id] = exchange
        return exchange

    def _facts(self, request: Request, path: bytes) -> Facts:
        """From the headers where they name the trajectory, else from the body."""
        limit = self.proxy.context_limit
        if request.trajectory:
            tokens = len(request.body) // _BYTES_A_TOKEN
            tokens = min(tokens, limit) if limit else tokens
            return Facts([], tokens, request.trajectory.decode(), request.task.decode() or "default")
        facts = read(path, request.body, limit)
        facts.task = request.task.decode() or facts.task or "default"
        if limit and len(facts.prompt_ids) + facts.tokens > limit:
            facts.tokens = limit - len(facts.prompt_ids)
        return facts

    def _next_id(self) -> str:
        self._number += 1
        return f"{self._origin}-{self._number:x}"

    def ended(self, exchange: Exchange, status: int, *, whole: bool) -> None:
        """An exchange is over: a worker's answer, or none."""
        del self.exchanges[exchange.request.trajectory_id]
        del self.by_request[exchange.request.request_id]
        seconds = self._loop.time() - exchange.since
        self.metrics.answered(exchange.endpoint, status, exchange.worker if whole else "", seconds)
        if exchange.answer is not None and exchange.named and self.recorder is not None:
            kept = Kept(
                exchange.request.request_id,
                exchange.endpoint,
                exchange.worker,
                status,
                whole,
                seconds,
                exchange.version,
                self.proxy.version,
                exchange.incoming.body,
                exchange.answer,
            )
            self.recorder.keep(exchange.request.trajectory_id, kept, self._loop.time())

    def find(self, id: str) -> Exchange | None:
        """By trajectory, or by request."""
        return self.exchanges.get(id) or self.by_request.get(id)

    # Workers.

    async def add(self, url: str, id: str, hardware: str, dialect: str, version: int) -> HTTPWorker:
        """Take a new worker into the fleet; made by `make_worker`."""
        worker = self.make_worker(url, id, hardware, dialect, version)
        if worker.id in self.joining:
            raise ValueError(f"worker id {worker.id!r} is taken by one that has not answered yet")
        try:
            await worker.start()
            self._take(worker)
        except BaseException:
            await worker.close()
            raise
        return worker

    def expect(self, worker: HTTPWorker) -> None:
        """Take a worker into the fleet once it answers, however long that takes."""
        if worker.id in self.joining:
            raise ValueError(f"worker id {worker.id!r} is given twice; give id=NAME")
        task = self.joining[worker.id] = self._loop.create_task(self._join(worker))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _join(self, worker: HTTPWorker) -> None:
        delay, told = _JOIN_FIRST, ""
        while True:
            try:
                await worker.start()
                break
            except Exception as error:  # whatever it answered, it is not ready yet
                if repr(error) != told:
                    told = repr(error)
                    _log.warning("waiting for worker %s: %s", worker.id, error)
            await asyncio.sleep(delay)
            delay = min(2 * delay, _JOIN_LONGEST)
        del self.joining[worker.id]
        self._take(worker)

    def _take(self, worker: HTTPWorker) -> None:
        self.proxy.add_worker(worker)
        self.watch(next(slot for slot in self.proxy.workers() if slot.worker is worker))

    def watch(self, slot: Slot) -> None:
        """Fence the worker when its watch loses it."""
        worker = self.worker(slot)
        worker.on_lost = lambda reason: self.proxy.lose(slot, reason)
        worker.watch()

    def worker(self, slot: Slot) -> HTTPWorker:
        return cast("HTTPWorker", slot.worker)

    def lost(self, exchange: Exchange, slot: Slot, reason: str) -> None:
        """The connection that carried an exchange failed: leave, and see whether the worker lives."""
        if exchange.upstream is None:  # nobody listens there
            self.proxy.passages.fail(exchange, reason)
        else:
            self.proxy.passages.leave(exchange, served=False)
            self.worker(slot).look()

    def troubled(self, slot: Slot, status: int) -> None:
        """A server error; enough of them in a row fence the worker."""
        errors = self._errors[slot] = self._errors.get(slot, 0) + 1
        if errors >= self.config.breaker:
            del self._errors[slot]
            self.worker(slot).cool_down()
            self.proxy.lose(slot, f"answered {status}, the last of {errors} server errors in a row")

    def fine(self, slot: Slot) -> None:
        if self._errors:
            self._errors.pop(slot, None)

    def others(self, slot: Slot) -> bool:
        """Whether another worker serves."""
        return any(other.serving for other in self.proxy.workers() if other is not slot)

    def mark(self, slot: Slot, version: int) -> bytes:
        """The header lines that say where an answer came from."""
        key = (slot.id, version)
        line = self._marks.get(key)
        if line is None:
            if len(self._marks) > 4096:
                self._marks.clear()
            line = self._marks[key] = f"x-llmproxy-worker: {slot.id}\r\nx-llmproxy-version: {version}\r\n".encode()
        return line


def _make_worker(url: str, id: str, hardware: str, dialect: str, version: int) -> HTTPWorker:
    return HTTPWorker(url, id=id, hardware=hardware, dialect=DIALECTS[dialect](), version=version)
