"""Faults that are on at the same time add up, and each ends what it did alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rollart.simulate.build import World, make_world
from rollart.simulate.clock import VirtualLoop
from rollart.simulate.config import make_simulation
from rollart.simulate.faults import happen


def world(faults: Sequence[dict[str, Any]]) -> World:
    """Two nodes of engines."""
    given = {
        "model": "qwen3-8b",
        "generation": [{"hardware": "H800", "gpus": 16}],
        "training": {"hardware": "H800", "gpus": 8},
        "tasks": {"Shop": "webshop"},
        "faults": faults,
    }
    return make_world(make_simulation({"tasks": {"Shop": {"kind": "env", "env": "sim:shop"}}, "simulate": given}))


def at(
    times: Sequence[float], faults: Sequence[dict[str, Any]], look: Callable[[World], Awaitable[Any]]
) -> list[Any]:
    """What is seen at these times while the faults happen."""

    async def run() -> list[Any]:
        subject, seen, clock = world(faults), [], asyncio.get_running_loop().time
        happening = asyncio.create_task(happen(subject))
        for time in times:
            await asyncio.sleep(time - clock())
            seen.append(await look(subject))
        await happening
        return seen

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(run())


async def serving(subject: World) -> int:
    told = await asyncio.gather(*(engine.probe() for engine in subject.engines), return_exceptions=True)
    return sum(isinstance(version, int) for version in told)


def test_a_node_stays_lost_until_the_last_fault_that_took_it_ends() -> None:
    faults = [{"kind": "node", "at": 10, "for_s": 20, "count": 2}, {"kind": "node", "at": 20, "for_s": 40}]
    assert at([5, 15, 35, 65], faults, serving) == [16, 0, 8, 16]


def test_storms_that_overlap_are_worse_than_one() -> None:
    async def weather(subject: World) -> tuple[float, float]:
        return subject.weather.reset_fails, subject.weather.slow

    faults = [
        {"kind": "environments", "at": 10, "for_s": 20, "factor": 0.2, "slow": 2},
        {"kind": "environments", "at": 20, "for_s": 40, "factor": 0.5, "slow": 3},
    ]
    assert at([5, 15, 25, 35, 65], faults, weather) == [(0, 1), (0.2, 2), (0.5, 6), (0.5, 3), (0, 1)]


def test_a_link_that_is_slow_twice_is_slower() -> None:
    async def pulled(subject: World) -> float:
        clock = asyncio.get_running_loop().time
        start = clock()
        await subject.nodes[0].link.carry(2.08 * 2**30)
        return round(clock() - start, 6)

    faults = [
        {"kind": "link", "at": 10, "for_s": 60, "factor": 0.5},
        {"kind": "link", "at": 20, "for_s": 20, "factor": 0.5},
    ]
    assert at([5, 15, 25, 45, 75], faults, pulled) == [1, 2, 4, 2, 1]
