"""Batch-level rollout: a turn begins when all are there."""

import asyncio
from typing import Any

from tests.envmanager.fakes import BufferClosed, FakeBuffer, FakePolicy, World, virtual

from envmanager import Barrier, RolloutScheduler


def test_every_turn_waits_for_the_slowest():
    async def scenario(barrier: Barrier | None) -> float:
        plans = {f"k{n}": {"step_s": float(n + 1), "turns": 2 + n} for n in range(4)}
        buffer = FakeBuffer(list(plans))
        options: dict[str, Any] = {"concurrency": 4, "closed": (BufferClosed,), "barrier": barrier}
        await RolloutScheduler(World(plans), FakePolicy(generate_s=0.0), buffer, **options).run()
        assert {ticket.fate for ticket in buffer.tickets} == {"finished"}
        return asyncio.get_running_loop().time()

    assert virtual(scenario(None)) == 4 * 5.0
    assert virtual(scenario(Barrier())) == 4 * 5.0  # the slowest is also the longest


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
    assert virtual(scenario(Barrier())) == 40.0


def test_who_leaves_early_holds_nobody_up():
    async def scenario() -> None:
        plans: dict[str, Any] = {"raises": {"step": ValueError("x")}, "stale": {"turns": 90}, "fine": {"turns": 3}}
        buffer = FakeBuffer(list(plans))
        options: dict[str, Any] = {"closed": (BufferClosed,), "barrier": Barrier()}
        running = asyncio.create_task(RolloutScheduler(World(plans), FakePolicy(), buffer, **options).run())
        await asyncio.sleep(2.5)
        buffer.tickets[1].end("stale")
        await running
        assert [ticket.fate for ticket in buffer.tickets] == ["failed", "stale", "finished"]
        assert asyncio.get_running_loop().time() == 6.0

    virtual(scenario())


def test_rewards_wait_for_the_last_episode():
    async def scenario(barrier: Barrier | None) -> list[float]:
        scored = []

        async def reward(trajectory: Any) -> float:
            scored.append(asyncio.get_running_loop().time())
            return 1.0

        plans: dict[str, Any] = {"short": {"turns": 1}, "long": {"turns": 4}, "raises": {"step": ValueError("x")}}
        buffer = FakeBuffer(list(plans))
        options: dict[str, Any] = {"closed": (BufferClosed,), "barrier": barrier, "reward": reward}
        await RolloutScheduler(World(plans), FakePolicy(generate_s=1.0), buffer, **options).run()
        return scored

    apart = virtual(scenario(None))
    assert apart[0] < apart[1]
    together = virtual(scenario(Barrier()))
    assert together == [apart[1], apart[1]]


def test_two_batches_after_each_other_both_wait_from_their_first_turn():
    class Slow(World):
        """The first turn of every second environment takes long."""

        def __call__(self, key: str) -> Any:
            env: Any = super().__call__(key)
            first = 10.0 if len(self.made) % 2 else 1.0

            async def step(action: str) -> Any:
                env.steps += 1
                await asyncio.sleep(first if env.steps == 1 else 1.0)
                return "o", 0.0, env.steps == 2, False, {}

            env.step = step
            return env

    async def scenario() -> float:
        barrier = Barrier()
        for _ in range(2):
            options: dict[str, Any] = {"closed": (BufferClosed,), "barrier": barrier}
            await RolloutScheduler(Slow(), FakePolicy(generate_s=0.0), FakeBuffer(["a", "b"]), **options).run()
        return asyncio.get_running_loop().time()

    assert virtual(scenario()) == 2 * 11.0
