"""Injected delays are a function of the seed and of nothing else."""

import asyncio

import pytest
from tests.envmanager.fakes import World, virtual

from envmanager import LatencyEnv


async def times(seed: int, mean: float, std: float) -> list[float]:
    loop = asyncio.get_running_loop()
    env = LatencyEnv(World(step_s=0.0)("k"), mean, std, seed)
    assert env.task == "fake" and (await env.reset(seed=4))[0] == "seed 4"
    ends = []
    for _ in range(50):
        began = loop.time()
        await env.step("a")
        ends.append(loop.time() - began)
    await env.close()
    return ends


def test_delays_follow_the_seed():
    first = virtual(times(1, 10.0, 5.0))
    assert first == pytest.approx(virtual(times(1, 10.0, 5.0))) and first != virtual(times(2, 10.0, 5.0))
    assert min(first) >= 0.0 and 8.0 < sum(first) / len(first) < 12.0
    assert virtual(times(1, 3.0, 0.0)) == pytest.approx([3.0] * 50)
    assert min(virtual(times(1, 1.0, 50.0))) == 0.0


def test_bad_delay():
    with pytest.raises(ValueError, match=r"std_s is -1"):
        LatencyEnv(None, 1.0, -1.0)
