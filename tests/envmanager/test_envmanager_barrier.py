"""Batch-level rollout: a turn begins when all are there."""

import asyncio
from typing import Any

import pytest
from tests.envmanager.fakes import BufferClosed, FakeBuffer, FakePolicy, World, virtual

from envmanager import Barrier, DeadlineExceeded, Limits, RolloutScheduler


def test_every_turn_waits_for_the_slowest():
    async def scenario(barrier: Barrier | None) -> float:
        plans = {f"k{n}": {"step_s": float(n + 1), "turns": 2 + n} for n in range(4)}
        buffer = FakeBuffer(list(plans))
        options: dict[str, Any] = {"concurrency": 4, "closed": (BufferClosed,), "barrier": barrier}
        await RolloutScheduler(World(plans), FakePolicy(generate_s=0.0), buffer, **options).run()
        assert {ticket.fate for ticket in buffer.tickets} == {"finished"}
        return asyncio.get_running_loop().time()

    assert virtual(scenario(None)) == 4 * 5.0
    assert virtual(scenario(Barrier(4))) == 4 * 5.0  # the slowest is also the longest
    assert virtual(scenario(Barrier(1))) == 4 * 5.0


def test_a_batch_takes_the_sum_of_its_slowest_turns():
    class Alternating(World):
        """Two environments, each slow when the other is quick."""

        def __call__(self, key: str) -> Any:
            env: Any = super().__call__(key)
            slow = "b" if len(self.made) == 1 else "a"

            async def step(action: str) -> Any:
                env.steps += 1
                turn = "a" if env.steps % 2 else "b"
                await asyncio.sleep(10.0 if turn == slow else 1.0)
                return "o", 0.0, env.steps == 4, False, {}

            env.step = step
            return env

    async def scenario(barrier: Barrier | None) -> float:
        buffer = FakeBuffer(["a", "b"])
        options: dict[str, Any] = {"closed": (BufferClosed,), "barrier": barrier}
        await RolloutScheduler(Alternating(), FakePolicy(generate_s=0.0), buffer, **options).run()
        return asyncio.get_running_loop().time()

    assert virtual(scenario(None)) == 22.0
    assert virtual(scenario(Barrier(2))) == 40.0


def test_who_leaves_early_holds_nobody_up():
    async def scenario() -> None:
        plans: dict[str, Any] = {"raises": {"step": ValueError("x")}, "stale": {"turns": 90}, "fine": {"turns": 3}}
        buffer = FakeBuffer(list(plans))
        options: dict[str, Any] = {"closed": (BufferClosed,), "barrier": Barrier(3)}
        running = asyncio.create_task(RolloutScheduler(World(plans), FakePolicy(), buffer, **options).run())
        await asyncio.sleep(2.5)
        buffer.tickets[1].end("stale")
        await running
        assert [ticket.fate for ticket in buffer.tickets] == ["failed", "stale", "finished"]
        assert asyncio.get_running_loop().time() == 6.0

    virtual(scenario())


def test_a_barrier_for_too_many_is_a_timeout():
    async def scenario() -> None:
        buffer = FakeBuffer(["k"])
        options: dict[str, Any] = {
            "closed": (BufferClosed,),
            "barrier": Barrier(2),
            "limits": Limits(turn_timeout=5.0),
        }
        await RolloutScheduler(World(), FakePolicy(), buffer, **options).run()
        assert isinstance(buffer.tickets[0].error, DeadlineExceeded)

    virtual(scenario())


def test_bad_size():
    with pytest.raises(ValueError, match="size is 0"):
        Barrier(0)
