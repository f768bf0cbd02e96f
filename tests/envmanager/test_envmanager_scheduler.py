"""The scheduler on virtual time, with a buffer that it does not know, under cancellations, failures and hangs."""

import asyncio
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.envmanager.fakes import FOREVER, BufferClosed, FakeBuffer, FakePolicy, World, virtual

from envmanager import (
    Circuit,
    DeadlineExceeded,
    InfrastructureError,
    Limits,
    RewardError,
    RolloutScheduler,
    Stats,
    Trajectory,
)
from envmanager.backends import Routed

CLOSED = (BufferClosed,)


def scheduler(world: World, buffer: FakeBuffer, policy: Any = None, **options: Any) -> RolloutScheduler:
    return RolloutScheduler(world, policy or FakePolicy(), buffer, closed=CLOSED, **options)


def balanced(stats: Stats) -> bool:
    ended = stats.finished.total() + stats.failed.total() + stats.cancelled.total()
    return stats.started == stats.running + stats.parked + stats.scoring + ended


def test_plays_everything_and_returns_when_the_groups_end():
    async def scenario() -> None:
        world, buffer = World(turns=2), FakeBuffer([f"k{n}" for n in range(10)])
        rollouts = scheduler(world, buffer, concurrency=4)
        await rollouts.run()
        assert [ticket.fate for ticket in buffer.tickets] == ["finished"] * 10
        assert all(ticket.reward == 1.0 and ticket.payload.reward == 1.0 for ticket in buffer.tickets)
        assert asyncio.get_running_loop().time() == 12.0  # three waves of two turns of 1 + 1 s
        assert world.most == 4 and not world.alive
        assert rollouts.stats().finished == {"accepted": 10} and rollouts.stats().kept.turns.mean == 2

    virtual(scenario())


def test_members_of_a_group_get_one_seed():
    async def scenario() -> None:
        world, buffer = World(), FakeBuffer(["a", "a", "b"])
        await scheduler(world, buffer).run()
        seeds = [env.seed for env in world.made]
        assert seeds[0] == seeds[1] != seeds[2]

    virtual(scenario())


def test_a_slow_environment_blocks_no_other():
    async def scenario() -> None:
        world = World({"slow": {"step": 1000.0}}, turns=1)
        buffer = FakeBuffer(["slow", *(f"k{n}" for n in range(20))])
        running = asyncio.create_task(scheduler(world, buffer, concurrency=2).run())
        await asyncio.sleep(41.0)
        assert [ticket.fate for ticket in buffer.tickets] == ["", *["finished"] * 20]
        await running

    virtual(scenario())


def test_scoring_frees_the_slot():
    async def reward(trajectory: Trajectory) -> float:
        await asyncio.sleep(100.0)
        return 7.0

    async def scenario() -> None:
        spans: list[Any] = []
        world, buffer = World(turns=1), FakeBuffer(["a", "b", "c"])
        options: dict[str, Any] = {"reward": reward, "observer": lambda *span: spans.append(span)}
        rollouts = scheduler(world, buffer, concurrency=1, **options)
        running = asyncio.create_task(rollouts.run())
        await asyncio.sleep(7.0)
        assert (rollouts.stats().running, rollouts.stats().scoring) == (0, 3) and not world.alive
        await running
        assert asyncio.get_running_loop().time() == 106.0
        assert [ticket.reward for ticket in buffer.tickets] == [7.0] * 3
        payload = buffer.tickets[0].payload
        assert (payload.reward, payload.turns[-1].reward, payload.timings.reward_s) == (7.0, 1.0, 100.0)
        assert [span[2:] for span in spans if span[0] == "reward"] == [(2.0, 102.0), (4.0, 104.0), (6.0, 106.0)]

    virtual(scenario())


def test_full_scoring_holds_slots_back():
    async def reward(trajectory: Trajectory) -> float:
        await asyncio.sleep(100.0)
        return 7.0

    async def scenario() -> None:
        world, buffer = World(turns=1), FakeBuffer(["k"] * 9)
        rollouts = scheduler(world, buffer, concurrency=2, reward=reward, scoring=1)
        running = asyncio.create_task(rollouts.run())
        await asyncio.sleep(50.0)
        assert (rollouts.stats().running, rollouts.stats().scoring, len(buffer.tickets)) == (2, 1, 3)
        await running

    virtual(scenario())


@pytest.mark.parametrize(
    ("scored", "kind"),
    [(float("nan"), RewardError), ("1", RewardError), (RuntimeError("x"), RewardError), (FOREVER, DeadlineExceeded)],
)
def test_a_failed_reward_is_a_failure_not_a_zero(scored, kind):
    async def reward(trajectory: Trajectory) -> Any:
        if scored == FOREVER:
            await asyncio.sleep(FOREVER)
        if isinstance(scored, Exception):
            raise scored
        return scored

    async def scenario() -> None:
        buffer = FakeBuffer(["k"])
        await scheduler(World(), buffer, reward=reward, limits=Limits(reward_timeout=60.0)).run()
        ticket = buffer.tickets[0]
        assert ticket.fate == "failed" and type(ticket.error) is kind and ticket.reward is None
        assert str(ticket.error).startswith("'k' in reward: ")

    virtual(scenario())


def test_the_machinery_is_tried_again_with_back_off_and_only_before_the_first_token():
    async def scenario() -> None:
        world = World({"reset": {"reset": ConnectionError("x")}, "step": {"step": ConnectionError("x")}})
        buffer = FakeBuffer(["reset", "step"])
        rollouts = scheduler(world, buffer, limits=Limits(reset_retries=3))
        await rollouts.run()
        assert [type(ticket.error) for ticket in buffer.tickets] == [InfrastructureError] * 2
        assert len(world.made) == 4 + 1 and rollouts.stats().retries == 3
        assert 3.5 <= asyncio.get_running_loop().time() <= 7.0  # 1 + 2 + 4 s, each at least halved by the jitter

    virtual(scenario())


def test_cancelling_a_ticket_ends_policy_and_environment_at_once():
    async def scenario() -> None:
        world, policy, buffer = World(turns=9), FakePolicy(), FakeBuffer(["a", "b"], ends=False)
        rollouts = scheduler(world, buffer, policy)
        running = asyncio.create_task(rollouts.run())
        await asyncio.sleep(2.5)  # both in their second generation
        buffer.tickets[0].end("stale")
        await asyncio.sleep(0.1)
        assert policy.cancelled == 1 and len(world.alive) == 1
        assert rollouts.stats().cancelled == {"stale": 1} and rollouts.stats().cut.turns.buckets == {1: 1}
        buffer.close()
        await running
        assert rollouts.stats().cancelled == {"stale": 1, "closed": 1} and not world.alive

    virtual(scenario())


def test_a_ticket_that_is_cancelled_before_it_starts_runs_nothing():
    class Already(FakeBuffer):
        async def next_ticket(self) -> Any:
            ticket = await super().next_ticket()
            ticket.end("stale")
            return ticket

    async def scenario() -> None:
        world = World()
        rollouts = scheduler(world, Already(["a", "b"]), concurrency=1)
        await rollouts.run()
        assert not world.made and rollouts.stats().cancelled == {"stale": 2} and balanced(rollouts.stats())

    virtual(scenario())


def test_cancelling_the_scheduler_returns_its_tickets():
    async def scenario() -> None:
        world, buffer = World(), FakeBuffer(["a", "b"], ends=False)
        running = asyncio.create_task(scheduler(world, buffer).run())
        await asyncio.sleep(1.5)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert [ticket.fate for ticket in buffer.tickets] == ["cancelled"] * 2 and not world.alive

    virtual(scenario())


def test_an_error_of_the_groups_is_raised_as_it_is():
    class Broken(FakeBuffer):
        async def next_ticket(self) -> Any:
            if self.tickets:
                raise LookupError("no tasks")
            return await super().next_ticket()

    async def scenario() -> None:
        world, buffer = World(), Broken(["a"])
        with pytest.raises(LookupError, match="no tasks"):
            await scheduler(world, buffer).run()
        assert buffer.tickets[0].fate == "cancelled" and not world.alive

    virtual(scenario())


@pytest.mark.parametrize("kind", ["reset", "generate", "step", "reward"])
def test_an_observer_that_raises_ends_the_rollout_and_leaves_nothing(kind):
    async def reward(trajectory: Trajectory) -> float:
        return 1.0

    def observer(seen: str, *span: Any) -> None:
        if seen == kind:
            raise OSError("the trace's disk is full")

    async def scenario() -> None:
        world, buffer = World(), FakeBuffer(["a", "b", "c"], ends=False)
        with pytest.raises((OSError, ExceptionGroup)):
            await scheduler(world, buffer, reward=reward, observer=observer, concurrency=2).run()
        assert all(ticket.fate == "cancelled" for ticket in buffer.tickets) and not world.alive

    virtual(scenario())


def test_a_failure_travels_and_holds_no_episode():
    async def scenario() -> None:
        buffer = FakeBuffer(["k"])
        await scheduler(World(step=ValueError("x")), buffer).run()
        error = buffer.tickets[0].error
        assert error is not None and error.__cause__ is not None
        assert error.__traceback__ is None and error.__cause__.__traceback__ is None
        again = pickle.loads(pickle.dumps(error))  # as Ray carries it
        assert (str(again), again.kind, again.key, again.phase) == (str(error), "data", "k", "step")

    virtual(scenario())


def test_runs_again_when_there_is_more():
    async def scenario() -> None:
        buffer = FakeBuffer(["a"])
        rollouts = scheduler(World(), buffer, concurrency=1)
        for fates in (["finished"], ["finished"] * 2):
            await rollouts.run()
            assert [ticket.fate for ticket in buffer.tickets] == fates
            buffer.keys.append("b")

    virtual(scenario())


def test_bad_configuration():
    with pytest.raises(ValueError, match="concurrency is 0"):
        scheduler(World(), None, concurrency=0)  # type: ignore[arg-type]


delays = st.sampled_from([0.0, 0.5, 1.0, 3.0])
plans = st.fixed_dictionaries(
    {
        "turns": st.integers(1, 4),
        "step_s": delays,
        "reset_s": delays,
        "close_s": st.sampled_from([0.0, 1.0, FOREVER]),
        "fault_turn": st.integers(1, 3),
    },
    optional={
        "reset": st.sampled_from([ValueError("x"), ConnectionError("x"), FOREVER, "not a tuple"]),
        "step": st.sampled_from([ValueError("x"), ConnectionError("x"), FOREVER, ("o", None, True, False, {})]),
    },
)
moments = st.one_of(st.none(), st.floats(0.0, 12.0))
scores = st.sampled_from([0.0, 1.0, 5.0, FOREVER, -1.0])


@settings(max_examples=60, deadline=None)
@given(
    episodes=st.lists(st.tuples(plans, moments, scores), min_size=1, max_size=6),
    concurrency=st.integers(1, 4),
    scoring=st.integers(1, 2),
    shutdown=moments,
    close=moments,
    routed=st.booleans(),
)
def test_nothing_is_alive_after_any_interleaving(episodes, concurrency, scoring, shutdown, close, routed):
    policy = FakePolicy()
    world = World({f"k{n}": plan for n, (plan, _, _) in enumerate(episodes)})
    waits = {f"k{n}": score for n, (_, _, score) in enumerate(episodes)}
    limits = Limits(reset_timeout=6.0, step_timeout=6.0, close_timeout=2.0, reward_timeout=9.0)

    async def reward(trajectory: Trajectory) -> float:
        if waits[trajectory.key] < 0:
            raise OSError("reward server is gone")
        await asyncio.sleep(waits[trajectory.key])
        return 1.0

    async def scenario() -> None:
        buffer = FakeBuffer(list(waits))
        options: dict[str, Any] = {"concurrency": concurrency, "reward": reward, "limits": limits}
        two = Routed({"0": world, "1": world}, lambda key: str(int(key[1:]) % 2))
        circuit = Circuit(threshold=1 if routed else 16, limit=99)
        make_env: Any = two if routed else world
        rollouts = scheduler(make_env, buffer, policy, scoring=scoring, circuit=circuit, **options)
        policy.hook = lambda: balance(rollouts)
        running = asyncio.create_task(rollouts.run())
        loop = asyncio.get_running_loop()

        def end(index: int) -> None:
            if index < len(buffer.tickets):
                buffer.tickets[index].end("stale")

        for index, (_, moment, _) in enumerate(episodes):
            if moment is not None:
                loop.call_at(moment, end, index)
        if close is not None:
            loop.call_at(close, buffer.close)
        if shutdown is not None:
            loop.call_at(shutdown, running.cancel)
        await asyncio.wait([running])
        assert running.cancelled() or running.exception() is None
        assert all(ticket.fate for ticket in buffer.tickets)
        assert not world.alive
        assert all(env.closes == 1 for env in world.made)
        assert world.most <= concurrency
        stats = rollouts.stats()
        assert balanced(stats) and stats.running == stats.parked == stats.scoring == 0
        assert stats.started == len(buffer.tickets)
        check_fates(buffer, stats)

    def balance(rollouts: RolloutScheduler) -> None:
        assert balanced(rollouts.stats()) and rollouts.stats().running <= concurrency

    virtual(scenario())


def check_fates(buffer: FakeBuffer, stats: Stats) -> None:
    """What the scheduler counted is what the buffer saw, and no failure came with a reward."""
    fates = [ticket.fate for ticket in buffer.tickets]
    assert fates.count("finished") == stats.finished["accepted"]
    for ticket in buffer.tickets:
        assert ticket.fate != "failed" or (ticket.error is not None and ticket.reward is None)
        assert ticket.fate != "finished" or ticket.reward == 1.0
        assert ticket.late in ([], ["finished"], ["failed"], ["cancelled"])


def test_every_ticket_ends_once():
    async def scenario() -> None:
        world = World({"hangs": {"step": FOREVER}, "raises": {"step": ValueError("x")}})
        buffer = FakeBuffer(["hangs", "raises", "fine"])
        await scheduler(world, buffer, limits=Limits(step_timeout=5.0)).run()
        assert [ticket.fate for ticket in buffer.tickets] == ["failed", "failed", "finished"]
        assert all(not ticket.late for ticket in buffer.tickets)

    virtual(scenario())


def test_limits_by_key():
    async def scenario() -> None:
        plans: dict[str, Any] = {"short": {"turns": 90}, "long": {"turns": 90}}
        limits = {"short": Limits(max_turns=2), "long": Limits(max_turns=5)}
        buffer = FakeBuffer(["short", "long", "short"])
        options: dict[str, Any] = {"closed": (BufferClosed,), "concurrency": 1, "limits": limits.__getitem__}
        await RolloutScheduler(World(plans), FakePolicy(), buffer, **options).run()
        assert [len(ticket.payload.turns) for ticket in buffer.tickets] == [2, 5, 2]

    virtual(scenario())
