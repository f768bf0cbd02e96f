"""Reward clients: local threads, and a real HTTP server on loopback that misbehaves on demand."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web
from tests.envmanager.fakes import BufferClosed, FakeBuffer, FakePolicy, World, served
from tests.envmanager.test_envmanager_values import trajectory

from envmanager import RewardError, RolloutScheduler, Trajectory
from envmanager.rewards import LocalReward, URLReward


@asynccontextmanager
async def client(url: str, **options: Any) -> AsyncIterator[URLReward]:
    reward = URLReward(url, first_wait=0.001, **options)
    try:
        yield reward
    finally:
        await reward.close()


async def test_local_reward_runs_in_a_thread():
    seen: list[int] = []

    def function(trajectory: Trajectory) -> float:
        seen.append(threading.get_ident())
        return trajectory.reward * 2

    reward = LocalReward(function)
    assert await reward(trajectory()) == 1.0 and seen != [threading.get_ident()]
    await reward.close()


async def test_whatever_a_local_reward_raises_arrives():
    def function(trajectory: Trajectory) -> float:
        return next(iter([]))

    reward = LocalReward(function)
    with pytest.raises(RewardError, match="StopIteration"):
        await asyncio.wait_for(reward(trajectory()), 20)
    await reward.close()


async def test_url_reward_sends_the_trajectory():
    got: list[Trajectory] = []

    async def handler(request: web.Request) -> web.Response:
        got.append(msgspec.json.decode(await request.read(), type=Trajectory))
        return web.json_response({"reward": 3, "why": "because"})

    async with served(handler) as url, client(url) as reward:
        assert await reward(trajectory()) == 3.0
        assert got == [trajectory()] and reward.stats().answered == 1 and reward.stats().milliseconds.count == 1


async def test_retries_carry_one_key():
    keys: list[str] = []
    answers = [503, 429, 200]

    async def handler(request: web.Request) -> web.Response:
        keys.append(request.headers["Idempotency-Key"])
        return web.json_response({"reward": 1.0}, status=answers[len(keys) - 1], headers={"Retry-After": "0"})

    async with served(handler) as url, client(url, headers={"X-Who": "me"}) as reward:
        assert await reward(trajectory()) == 1.0
        assert len(keys) == 3 and len(set(keys)) == 1 and reward.stats().retries == 2


async def test_retries_are_bounded():
    tries = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal tries
        tries += 1
        return web.Response(status=500, text="out of order")

    async with served(handler) as url, client(url, retries=2) as reward:
        with pytest.raises(RewardError, match=r"answered 500 'out of order', after 3 tries"):
            await reward(trajectory())
        assert tries == 3 and reward.stats().failed == 1


async def test_a_dead_server_and_a_silent_one():
    async def handler(request: web.Request) -> web.Response:
        await asyncio.sleep(30)
        return web.Response()

    async with served(handler) as url, client(url, timeout=0.05, retries=1) as reward:
        with pytest.raises(RewardError, match=r"no answer within 0.05 s, after 2 tries"):
            await reward(trajectory())
    async with client(url, retries=0) as reward:
        with pytest.raises(RewardError, match="ClientConnectorError"):
            await reward(trajectory())


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (404, b"nothing here", "answered 404 'nothing here'; repeating"),
        (200, b"<html>", "'<html>'; answer"),
        (200, b'{"score": 1}', "reward"),
        (200, b'{"reward": "1"}', "Expected `float`"),
        (200, b'{"reward": NaN}', "answer"),
        (200, b'{"reward": 1' + b" " * (5 << 20) + b"}", "more than 4194304 bytes"),
    ],
)
async def test_wrong_answers_are_errors(status, body, said):
    tries = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal tries
        tries += 1
        return web.Response(status=status, body=body)

    async with served(handler) as url, client(url) as reward:
        with pytest.raises(RewardError, match=said):
            await reward(trajectory())
        assert tries == 1


async def test_concurrency_is_bounded():
    now, most = 0, 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        now -= 1
        return web.json_response({"reward": 1.0})

    async with served(handler) as url, client(url, concurrency=3) as reward:
        await asyncio.gather(*(reward(trajectory()) for _ in range(12)))
        assert most == 3


async def test_concurrency_is_reached():
    inside, all_in = 0, asyncio.Event()

    async def handler(request: web.Request) -> web.Response:
        nonlocal inside
        inside += 1
        if inside == 150:
            all_in.set()
        await all_in.wait()
        return web.json_response({"reward": 1.0})

    async with served(handler) as url, client(url, concurrency=150, timeout=10.0, retries=0) as reward:
        assert await asyncio.gather(*(reward(trajectory()) for _ in range(150))) == [1.0] * 150


async def test_a_cancelled_trajectory_ends_its_call():
    entered, ended = asyncio.Event(), asyncio.Event()

    async def handler(request: web.Request) -> web.Response:
        entered.set()
        try:
            await asyncio.sleep(30)
        finally:
            ended.set()
        return web.Response()

    buffer = FakeBuffer(["k"])
    async with served(handler) as url, client(url) as reward:
        options: dict[str, Any] = {"reward": reward, "closed": (BufferClosed,)}
        rollouts = RolloutScheduler(World(step_s=0.0), FakePolicy(generate_s=0.0), buffer, **options)
        running = asyncio.create_task(rollouts.run())
        await entered.wait()
        buffer.tickets[0].end("stale")
        await running
        await ended.wait()
        assert rollouts.stats().cancelled == {"stale": 1}


def test_bad_configuration():
    with pytest.raises(ValueError, match="timeout is 0"):
        URLReward("http://x", timeout=0)
