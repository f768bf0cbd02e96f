"""Environments behind a real HTTP server, and what networks and callers do to them."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from tests.envmanager.fakes import FOREVER, BufferClosed, FakeBuffer, FakePolicy, World

from envmanager import DataError, DeadlineExceeded, EnvManager, InfrastructureError, Limits, RolloutScheduler
from envmanager.backends import HTTPBackend
from envmanager.backends.server import EnvServer
from envmanager.backends.wire import Ask, Told
from envmanager.policies import RandomPolicy

pytestmark = pytest.mark.real


@asynccontextmanager
async def serving(world: World, **options: Any) -> AsyncIterator[tuple[EnvServer, str]]:
    server = EnvServer(world, **options)
    runner = web.AppRunner(server.app(), handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield server, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
        assert not world.alive and not server.alive


def quick(**plan: Any) -> World:
    return World(**({"step_s": 0.0} | plan))


POLICY = FakePolicy(generate_s=0.0)


async def test_an_episode_over_http():
    world = quick()
    async with serving(world) as (server, url), HTTPBackend(url) as backend:
        played = await EnvManager(backend, POLICY).run("k", 5)
        assert (played.task, played.turns[0].observation, played.reward) == ("fake", "seed 5", 1.0)
        assert played.metadata == {"start": 5, "steps": 3}
        assert not server.alive and [env.closes for env in world.made] == [1]


@pytest.mark.parametrize(
    ("plan", "kind", "said"),
    [
        ({"reset": ValueError("no level")}, DataError, "reset raised ValueError: no level"),
        ({"step": ("o", 1.0, True, {})}, DataError, "return the 5-tuple"),
        ({"step": ConnectionError("x")}, InfrastructureError, "step raised ConnectionError"),
        ({"step": FOREVER}, DeadlineExceeded, "step took longer"),
        ({"reset": FOREVER}, DeadlineExceeded, "reset took longer"),
    ],
)
async def test_failures_keep_their_kind_and_leave_nothing(plan, kind, said):
    async with serving(quick(**plan)) as (server, url), HTTPBackend(url) as backend:
        hangs = {name: 0.3 if plan.get(name) == FOREVER else 60.0 for name in ("step", "reset")}
        limits = Limits(step_timeout=hangs["step"], reset_timeout=hangs["reset"])
        with pytest.raises(kind, match=said):
            await EnvManager(backend, POLICY, limits=limits).run("k", 0)
        assert not server.alive


@asynccontextmanager
async def post(url: str, body: bytes, headers: dict[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
    async with aiohttp.ClientSession(headers=headers) as session, session.post(url, data=body) as response:
        yield response


async def ask(url: str, id: str, *call: Any, token: str = "") -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with post(f"{url}/envs/{id}", msgspec.msgpack.encode(Ask(*call)), headers) as response:
        body = await response.read()
        return response.status, msgspec.msgpack.decode(body, type=Told) if response.status == 200 else body


async def test_a_repeated_step_is_not_taken_twice():
    world = quick(turns=9)
    async with serving(world) as (_, url):
        assert (await ask(url, "a", 1, "reset", ["k", 0]))[1].value[1] == "seed 0"
        first = await ask(url, "a", 2, "step", "x")
        assert first == await ask(url, "a", 2, "step", "x") and world.made[0].steps == 1
        assert (await ask(url, "a", 1, "reset", ["k", 0]))[0] == 409
        assert (await ask(url, "a", 4, "step", "x"))[0] == 409
        assert world.made[0].steps == 1
        assert (await ask(url, "a", 3, "close", None))[0] == (await ask(url, "a", 3, "close", None))[0] == 200


async def test_a_slow_call_is_asked_for_again_and_taken_once():
    world = quick(reset=0.5, step=0.5, turns=1)
    async with serving(world) as (_, url), HTTPBackend(url, poll_s=0.1, retries=1, first_wait=0.01) as backend:
        assert (await EnvManager(backend, POLICY).run("k", 0)).reward == 1.0
        assert world.made[0].steps == 1 and backend.stats().answered >= 10


async def test_a_caller_that_does_not_say_how_long_it_waits_is_told_when_it_is_done():
    async with serving(quick(reset=0.3)) as (_, url):
        assert (await ask(url, "a", 1, "reset", ["k", 0]))[1].value[1] == "seed 0"


async def test_a_late_reset_makes_nothing():
    world = quick()
    async with serving(world) as (_, url):
        await ask(url, "a", 2, "close", None)
        assert (await ask(url, "a", 1, "reset", ["k", 0]))[0] == 410 and not world.made


async def test_a_lost_environment_is_known():
    async with serving(quick()) as (server, url), HTTPBackend(url) as backend:
        env = backend("k")
        await env.reset(seed=0)
        server._close(env._path.rsplit("/", 1)[1])
        with pytest.raises(InfrastructureError, match="answered 410 'this environment is closed or was lost'"):
            await env.step("x")


async def test_a_caller_that_goes_away_while_closing_stops_nothing():
    world = quick(close_s=0.3)
    async with serving(world) as (_, url):
        await ask(url, "a", 1, "reset", ["k", 0])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await ask(url, "a", 2, "close", None)
        assert (await ask(url, "a", 2, "close", None))[0] == 200
    assert world.made[0].closes == 1 and not world.alive


async def test_an_abandoned_environment_is_closed():
    world = quick()
    async with serving(world, idle_s=0.05) as (server, url), HTTPBackend(url) as backend:
        await backend("k").reset(seed=0)
        while server.alive or world.alive:  # noqa: ASYNC110 - the server's own timer ends it
            await asyncio.sleep(0.01)
        assert world.made[0].closes == 1


async def test_a_full_server_is_waited_for():
    world = quick(turns=2)
    async with serving(world, capacity=2) as (_, url), HTTPBackend(url, poll_s=0.1, retries=0) as backend:
        buffer = FakeBuffer(["k"] * 12)
        options: dict[str, Any] = {"limits": Limits(reset_retries=0), "closed": (BufferClosed,)}
        await RolloutScheduler(backend, POLICY, buffer, concurrency=4, **options).run()
        assert [ticket.fate for ticket in buffer.tickets] == ["finished"] * 12 and world.most == 2
        assert (await ask(url, "a", 1, "reset", ["k", 0]))[0] == (await ask(url, "b", 1, "reset", ["k", 0]))[0] == 200
        assert (await ask(url, "c", 1, "reset", ["k", 0]))[0] == 503  # this caller does not say how long it waits


async def test_a_server_that_ends_lets_nobody_wait_for_room():
    world = quick()
    async with serving(world, capacity=1) as (server, url):
        backend = HTTPBackend(url, retries=0)
        await backend("a").reset(seed=0)
        waiting = asyncio.ensure_future(backend("b").reset(seed=0))
        while not server._one_closed._waiters:  # noqa: ASYNC110 - until it waits there
            await asyncio.sleep(0.01)
    with pytest.raises(InfrastructureError):
        await waiting
    await backend.close()
    assert len(world.made) == 1


async def test_a_dead_server_is_infrastructure():
    async with HTTPBackend("http://127.0.0.1:9", retries=1, first_wait=0.01) as backend:
        with pytest.raises(InfrastructureError, match="after 2 tries"):
            await EnvManager(backend, POLICY).run("k", 0)


async def test_only_with_the_token():
    async with serving(quick(), token="secret") as (_, url):
        assert (await ask(url, "a", 1, "reset", ["k", 0]))[0] == 401
        assert (await ask(url, "a", 1, "reset", ["k", 0], token="secret"))[0] == 200
        async with HTTPBackend(url, token="secret") as backend:
            assert (await EnvManager(backend, POLICY).run("k", 0)).reward == 1.0


CALLS = [
    Ask(1, "reset", "k"),
    Ask(1, "reset", ["k", "0"]),
    Ask(2, "reset", ["k", 0]),
    Ask(1, "step", "x"),
    Ask(1, "score", 0),
]


@pytest.mark.parametrize("body", [b"", b"\xc1", b"{}", *map(msgspec.msgpack.encode, CALLS)])
async def test_nonsense_is_refused(body):
    async with serving(quick()) as (server, url), post(f"{url}/envs/a", body, {}) as response:
        assert response.status == 400 and not server.alive


async def test_the_command_serves_until_it_is_told_to_end():
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "ENVMANAGER_TOKEN": "t"}
    command = ["-m", "envmanager.cli", "serve-env", "gymnasium:FrozenLake-v1", "--port", "0", "--isolate"]
    pipe = asyncio.subprocess.PIPE
    server = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=pipe, env=environ)
    assert server.stdout is not None
    said = (await server.stdout.readline()).decode()
    async with HTTPBackend(said.split(" on ")[1].strip(), token="t") as backend:
        played = await EnvManager(backend, RandomPolicy(), limits=Limits(max_turns=3)).run("k", 0)
        assert played.task == "FrozenLake" and "Actions: left" in played.turns[0].observation
    server.send_signal(signal.SIGTERM)
    assert await server.wait() == 0
