"""Collecting groups without a buffer, with redundancy, failures and heavy tails, on virtual time."""

import asyncio
import random
from typing import Any

import pytest
from tests.envmanager.fakes import FOREVER, FakeEnv, FakePolicy, World, virtual

from envmanager import Budgets, Collection, Limits, Starved, collect


def test_every_key_once():
    async def scenario() -> None:
        world = World(turns=2)
        results = await collect(world, FakePolicy(), [f"k{n}" for n in range(20)], concurrency=5)
        assert [group.key for group in results.groups] == [f"k{n}" for n in range(20)]
        assert results.mean_reward == 1.0 and results.seconds == 16.0 and not world.alive

    virtual(scenario())


def test_redundancy_cuts_the_tail_and_reports_the_bias():
    rng = random.Random(0)

    class Tail(World):
        """One member in eight takes a hundred times as many turns."""

        def __call__(self, key: str) -> FakeEnv:
            self.default = {"turns": 200 if rng.random() < 0.125 else 2}
            return super().__call__(key)

    async def scenario(**options: Any) -> Collection:
        world = Tail()
        results = await collect(world, FakePolicy(), [f"k{n}" for n in range(10)], concurrency=1000, **options)
        assert not world.alive
        return results

    plain = virtual(scenario(group_size=4, limits=Limits(max_turns=1000)))
    spare = virtual(scenario(group_size=4, spare_groups=2, spare_members=2, limits=Limits(max_turns=1000)))
    assert plain.seconds == 400.0 and spare.seconds < 10.0
    assert all(len(group.trajectories) == 4 for group in spare.groups) and len(spare.groups) == 8
    assert plain.cut.turns.count == 0 and plain.kept.turns.count == 40
    assert spare.kept.turns.count == 32 and spare.kept.turns.mean == 2.0
    assert spare.cut.turns.count == 60 - 32 and spare.stats.cancelled.keys() == {"surplus"}


def test_fair_waits_for_the_slow():
    async def scenario() -> None:
        world = World({"slow": {"turns": 50}}, turns=1)
        results = await collect(world, FakePolicy(), ["slow", "b", "c"], spare_groups=1, fair=True)
        assert [group.key for group in results.groups] == ["slow", "b"] and results.seconds == 100.0

    virtual(scenario())


def test_a_hanging_environment_is_killed_and_replaced():
    async def scenario() -> None:
        class Once(World):
            def __call__(self, key: str) -> FakeEnv:
                self.default = {"turns": 1, "step": FOREVER if not self.made else None}
                return super().__call__(key)

        world = Once()
        results = await collect(world, FakePolicy(), ["a"], limits=Limits(step_timeout=10.0))
        assert len(world.made) == 2 and results.stats.failed == {"timeout": 1} and results.seconds == 13.0

    virtual(scenario())


def test_starved_says_why_and_hands_out_the_rest():
    async def scenario() -> None:
        world = World({"bad": {"reset": ValueError("level 3 is missing")}})
        with pytest.raises(Starved, match=r"1 of 2 groups are whole.*'bad'.*level 3 is missing") as caught:
            await collect(world, FakePolicy(), ["good", "bad"], budgets=Budgets(data=2), concurrency=1)
        assert [group.key for group in caught.value.results.groups] == ["good"]
        assert caught.value.results.stats.failed == {"data": 3}

    virtual(scenario())


def test_cancelled_from_outside():
    async def scenario() -> None:
        world = World()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.5):
                await collect(world, FakePolicy(), ["a", "b"])
        assert not world.alive

    virtual(scenario())
