"""Time jumps, timers keep their order, and a deadlock is an error."""

from __future__ import annotations

import asyncio
from functools import partial
from random import Random

import pytest

from rollart.simulate.clock import VirtualLoop
from rollart.simulate.errors import Stalled


def virtual(work, order: Random | None = None):
    with asyncio.Runner(loop_factory=partial(VirtualLoop, order)) as runner:
        return runner.run(work)


def test_a_year_passes_at_once() -> None:
    async def run() -> float:
        await asyncio.sleep(365 * 86400)
        return asyncio.get_running_loop().time()

    assert virtual(run()) == 365 * 86400


def test_timers_of_one_instant_fire_as_they_were_set() -> None:
    async def run() -> list[int]:
        fired: list[int] = []
        loop = asyncio.get_running_loop()
        for number in range(100):
            loop.call_at(5.0, fired.append, number)
        loop.call_at(4.0, fired.append, -1)
        await asyncio.sleep(6)
        return fired

    assert virtual(run()) == list(range(-1, 100))


def test_in_a_random_order_all_that_is_ready_runs_before_time_goes_on() -> None:
    async def run() -> list[int]:
        fired: list[int] = []
        loop = asyncio.get_running_loop()
        for number in range(100):
            loop.call_at(5.0, fired.append, number)
        loop.call_at(6.0, fired.append, 100)
        await asyncio.sleep(7)
        return fired

    first, again, other = (virtual(run(), Random(seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert sorted(first) == list(range(101)) and first[-1] == 100 and first[:-1] != list(range(100))


def test_deadlines_that_are_not_reached_leave_nothing_behind() -> None:
    async def run() -> int:
        for _ in range(20_000):
            async with asyncio.timeout(1000):
                await asyncio.sleep(0.001)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        return len(loop._timers)

    assert virtual(run()) < 3000


def test_a_deadline_that_is_reached_is_reached_on_time() -> None:
    async def run() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.5):
                await asyncio.sleep(10)
        return asyncio.get_running_loop().time()

    assert virtual(run()) == 2.5


def test_executors_take_no_time() -> None:
    async def run() -> tuple[int, float]:
        return await asyncio.to_thread(lambda: 7), asyncio.get_running_loop().time()

    assert virtual(run()) == (7, 0.0)


def test_waiting_for_nothing_is_an_error() -> None:
    async def run() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Stalled, match="nothing is left to happen"):
        virtual(run())
