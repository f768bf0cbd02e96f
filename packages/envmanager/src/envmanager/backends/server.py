"""`envmanager serve-env`: environments for callers elsewhere, each under an id that its caller chose.

Invariants:
- calls of an environment are numbered from 1 and run one at a time; a repeated number gets the reply of the
  first, any other is refused (test_envmanager_http.py::test_a_repeated_step_is_not_taken_twice);
- a closed id stays closed, so that a late reset makes nothing
  (test_envmanager_http.py::test_a_late_reset_makes_nothing);
- an environment that nobody asks anything for `idle_s` is closed, and all of them at the end, so that a lost
  caller leaks nothing (test_envmanager_http.py::test_an_abandoned_environment_is_closed).
"""

import asyncio
import contextlib
import logging
import re
from collections import OrderedDict
from hmac import compare_digest
from typing import Any

import msgspec
from aiohttp import web

from envmanager.backends.wire import PENDING, Ask, Told
from envmanager.checks import check_count, check_seconds
from envmanager.contract import plain
from envmanager.deadline import within
from envmanager.errors import RolloutError
from envmanager.host import EnvHost
from envmanager.protocols import MakeEnv
from envmanager.threads import Threads

log = logging.getLogger(__name__)

# A late request is late by minutes; ids of so many closed environments cover hours.
CLOSED_IDS = 100_000
CLOSE_S = 10.0
# How long a caller waits before it wants to hear that its call goes on; who does not say waits for the reply.
PATIENCE = re.compile(r"wait=(\d+(?:\.\d+)?)")


class _Served:
    """One environment, the number of its latest call, and the task that answers that."""

    __slots__ = ("answering", "host", "number", "timer")

    def __init__(self, host: EnvHost) -> None:
        self.host = host
        self.number = 0
        self.answering: asyncio.Task[Told] | None = None
        self.timer: asyncio.TimerHandle | None = None


class EnvServer:
    """Serves at most `capacity` environments. With a `token`, only to callers that have it."""

    def __init__(self, make_env: MakeEnv, *, capacity: int = 256, idle_s: float = 3600.0, token: str = "") -> None:
        check_count("capacity", capacity, 1)
        check_seconds("idle_s", idle_s)
        self._make_env = make_env
        self._capacity = capacity
        self._idle_s = idle_s
        self._token = token
        self._threads = Threads()
        self._envs: dict[str, _Served] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()
        self._one_closed = asyncio.Event()
        self._decoder = msgspec.msgpack.Decoder(Ask)

    @property
    def alive(self) -> int:
        """Environments that are open or still closing."""
        return len(self._envs) + len(self._closing)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/envs/{id}", self._handle)
        app.router.add_get("/health", self._health)
        app.on_shutdown.append(self._shut_down)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"alive": self.alive, "capacity": self._capacity, "stuck": self._threads.stuck})

    async def _handle(self, request: web.Request) -> web.Response:
        given = request.headers.get("Authorization", "").encode(errors="replace")
        if self._token and not compare_digest(given, f"Bearer {self._token}".encode()):
            return web.Response(status=401, text="the token is missing or wrong")
        try:
            ask = self._decoder.decode(await request.read())
        except msgspec.MsgspecError as error:
            return web.Response(status=400, text=f"not a call: {error}")
        id = request.match_info["id"]
        if ask.call not in ("reset", "step", "close") or (ask.call == "reset") != (ask.incarnation == 1):
            return web.Response(status=400, text="the first call is reset, others are step, the last is close")
        if ask.call == "close":
            if (closing := self._close(id)) is not None:
                await asyncio.wait([closing])
            return _reply(Told(ask.incarnation))
        said = PATIENCE.fullmatch(request.headers.get("Prefer", ""))
        patience = float(said[1]) if said else None
        if ask.call == "reset" and patience is not None and id not in self._envs:
            await self._room(patience)
        served = self._envs.get(id)
        if served is None:
            refusal = self._refusal(id, ask, patience)
            if refusal is not None:
                return refusal
            served = self._envs[id] = _Served(EnvHost(self._make_env, ask.argument[0], self._threads))
        return await self._answered(id, served, ask, patience)

    async def _room(self, seconds: float) -> None:
        """Waits until another environment can be made, or for so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while 0 < self._capacity <= self.alive:
                    self._one_closed.clear()
                    await self._one_closed.wait()

    def _refusal(self, id: str, ask: Ask, patience: float | None) -> web.Response | None:
        """Why there is no environment under this id, and will be none."""
        if id in self._closed or ask.call != "reset":
            return web.Response(status=410, text="this environment is closed or was lost")
        if not _names_an_instance(ask.argument):
            return web.Response(status=400, text="reset takes [key, seed]")
        if self.alive >= self._capacity and patience is not None:
            return _reply(Told(ask.incarnation, kind=PENDING))
        if self.alive >= self._capacity:
            return web.Response(status=503, text=f"all {self._capacity} environments are taken")
        return None

    async def _answered(self, id: str, served: _Served, ask: Ask, patience: float | None) -> web.Response:
        """Starts the call, or finds it again, and waits for its reply, or for so long."""
        if ask.incarnation == served.number + 1 and (served.answering is None or served.answering.done()):
            served.number += 1
            served.answering = asyncio.create_task(_answer(served.host, ask))
        elif ask.incarnation != served.number or served.answering is None:
            return web.Response(status=409, text=f"call {ask.incarnation} does not follow call {served.number}")
        self._rest(id, served)
        answering = served.answering
        await asyncio.wait([answering], timeout=patience)
        if not answering.done():
            return _reply(Told(ask.incarnation, kind=PENDING))
        if answering.cancelled():
            return web.Response(status=410, text="this environment was closed meanwhile")
        self._rest(id, served)
        return _reply(answering.result())

    def _rest(self, id: str, served: _Served) -> None:
        """Begins the idle time anew."""
        if served.timer is not None:
            served.timer.cancel()
        if id in self._envs:
            served.timer = asyncio.get_running_loop().call_later(self._idle_s, self._abandon, id)

    def _abandon(self, id: str) -> None:
        log.warning("closing environment %s: nobody asked anything for %.0f s", id, self._idle_s)
        self._close(id)

    def _close(self, id: str) -> asyncio.Task[None] | None:
        """Forgets the environment at once, and ends it in a task of the server's: a caller that goes away stops
        nothing.
        """
        self._closed[id] = None
        if len(self._closed) > CLOSED_IDS:
            self._closed.popitem(last=False)
        served = self._envs.pop(id, None)
        if served is None:
            return None
        closing = asyncio.create_task(_end(id, served))
        self._closing.add(closing)
        closing.add_done_callback(self._is_closed)
        return closing

    def _is_closed(self, closing: asyncio.Task[None]) -> None:
        self._closing.discard(closing)
        self._one_closed.set()

    async def _shut_down(self, app: web.Application) -> None:
        self._capacity = 0  # whoever waits for room hears at once that there will be none
        self._one_closed.set()
        for id in list(self._envs):
            self._close(id)
        await asyncio.gather(*self._closing)


async def _end(id: str, served: _Served) -> None:
    if served.timer is not None:
        served.timer.cancel()
    if served.answering is not None:
        served.answering.cancel()
        await asyncio.wait([served.answering])
    try:
        await within("close", CLOSE_S, served.host.close())
    except RolloutError as error:
        log.warning("closing environment %s: %s", id, error)


def _names_an_instance(argument: Any) -> bool:
    if not isinstance(argument, list) or len(argument) != 2:
        return False
    key, seed = argument
    return isinstance(key, str) and (seed is None or isinstance(seed, int))


async def _answer(host: EnvHost, ask: Ask) -> Told:
    try:
        if ask.call == "reset":
            observation, info = await host.reset(ask.argument[1])
            return Told(ask.incarnation, [host.task, observation, plain(info)])
        *rest, info = await host.step(str(ask.argument), None)
        return Told(ask.incarnation, [*rest, plain(info)])
    except RolloutError as error:
        return Told(ask.incarnation, None, error.kind, str(error))


def _reply(told: Told) -> web.Response:
    return web.Response(body=msgspec.msgpack.encode(told), content_type="application/msgpack")
