"""Scoring on devices that stand by, and on functions that come and go."""

from __future__ import annotations

import asyncio

import pytest

from rollart.simulate.clock import VirtualLoop
from rollart.simulate.rewards import Dedicated, Serverless


async def scored(rewards, seconds: float, calls: int) -> tuple[float, float]:
    await asyncio.gather(*(rewards.score(seconds) for _ in range(calls)))
    now = asyncio.get_running_loop().time()
    return now, rewards.used(now)


def virtual(work):
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def test_dedicated_devices_score_so_many_at_a_time_and_idle_for_money() -> None:
    async def run() -> None:
        rewards = Dedicated(2, 3)
        assert await scored(rewards, 10.0, 12) == pytest.approx((20.0, 1.0))
        await asyncio.sleep(20.0)
        assert rewards.used(40.0) == pytest.approx(0.5)

    virtual(run())


def test_functions_score_all_at_once_and_cost_while_they_are_there() -> None:
    async def run() -> None:
        rewards = Serverless(call_s=1.0, cold_s=10.0)
        now, used = await scored(rewards, 10.0, 50)
        assert now == pytest.approx(11.0)
        assert used == pytest.approx(1.0)
        await asyncio.sleep(100.0)
        assert rewards.used(111.0) == pytest.approx(0.5)

    virtual(run())
