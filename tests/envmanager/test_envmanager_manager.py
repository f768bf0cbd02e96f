"""One controller, one episode at a time: its trajectory, its failures, its deadlines."""

import asyncio
import math
from typing import Any

import pytest
from tests.envmanager.fakes import FOREVER, FakeBuffer, FakePolicy, FakeTicket, World, virtual

from envmanager import (
    Busy,
    DataError,
    DeadlineExceeded,
    EnvManager,
    InfrastructureError,
    Limits,
    PolicyError,
    RolloutError,
    Span,
)


def play(world: World, policy: Any = None, ticket: Any = None, observer: Any = None, **limits: Any) -> Any:
    manager = EnvManager(world, policy or FakePolicy(), limits=Limits(**limits), observer=observer)
    return virtual(manager.run("k", 11, ticket))


def test_a_trajectory_records_every_turn_and_when():
    spans: list[Any] = []
    trajectory = play(World(turns=2, reset_s=5.0), observer=lambda *span: spans.append(span))
    first, second = trajectory.turns
    assert (first.observation, first.action, second.observation) == ("seed 11", "a0", "after a0")
    assert (first.token_ids, first.prompt_ids, first.new_segment) == ([1, 2, 3], [7, 8], True)
    assert first.spans == [Span(0, 0, 2), Span(1, 2, 3)] and first.logprobs == [-0.1, -0.2, -0.3]
    assert (first.generate_at, first.generate_s, first.env_at, first.env_s) == (5.0, 1.0, 6.0, 1.0)
    assert (second.generate_at, second.reward) == (7.0, 1.0)
    assert (trajectory.key, trajectory.seed, trajectory.task, trajectory.reward) == ("k", 11, "fake", 1.0)
    assert (trajectory.outcome.kind, trajectory.outcome.turns) == ("terminated", 2)
    assert (trajectory.timings.started, trajectory.timings.reset_s, trajectory.timings.ended) == (0.0, 5.0, 9.0)
    assert trajectory.metadata == {"start": 11, "steps": 2}
    kinds = [(kind, start, end) for kind, _, start, end in spans]
    assert kinds == [
        ("reset", 0.0, 5.0),
        ("generate", 5.0, 6.0),
        ("step", 6.0, 7.0),
        ("generate", 7.0, 8.0),
        ("step", 8.0, 9.0),
    ]
    assert {id for _, id, _, _ in spans} == {trajectory.id}


@pytest.mark.parametrize(
    ("env", "policy", "limits", "kind", "phase"),
    [
        ({"reset": ValueError("x")}, {}, {}, DataError, "reset"),
        ({"reset": ("o", {}, 1)}, {}, {}, DataError, "reset"),
        ({"reset": ConnectionResetError("x")}, {}, {}, InfrastructureError, "reset"),
        ({"reset": FOREVER}, {}, {"reset_timeout": 9.0}, DeadlineExceeded, "reset"),
        ({"step": KeyError("x")}, {}, {}, DataError, "step"),
        ({"step": SystemExit(3)}, {}, {}, DataError, "step"),
        ({"step": StopIteration()}, {}, {}, DataError, "step"),
        ({"step": ("o", math.nan, False, False, {})}, {}, {}, DataError, "step"),
        ({"step": ("o", 0.0, True, {})}, {}, {}, DataError, "step"),
        ({"step": (b"o", 0.0, True, False, {})}, {}, {}, DataError, "step"),
        ({"step": MemoryError()}, {}, {}, InfrastructureError, "step"),
        ({"step": TimeoutError("the environment's own")}, {}, {}, InfrastructureError, "step"),
        ({"step": FOREVER}, {}, {"step_timeout": 9.0}, DeadlineExceeded, "step"),
        ({"step": FOREVER}, {}, {"turn_timeout": 9.0}, DeadlineExceeded, "step"),
        ({"turns": 1000}, {}, {"max_turns": 1000, "episode_timeout": 99.5}, DeadlineExceeded, "step"),
        ({}, {"generate_s": FOREVER}, {"turn_timeout": 9.0}, DeadlineExceeded, "generate"),
        ({}, {"fault": RuntimeError("engine gone")}, {}, PolicyError, "generate"),
        ({}, {"fault": TimeoutError("the policy's own")}, {}, PolicyError, "generate"),
    ],
)
def test_every_failure_is_typed_and_says_where(env, policy, limits, kind, phase):
    world = World(**env)
    with pytest.raises(RolloutError) as caught:
        play(world, FakePolicy(**policy), **limits)
    assert type(caught.value) is kind
    assert (caught.value.key, caught.value.phase) == ("k", phase)
    assert str(caught.value).startswith(f"'k' in {phase}: ")
    assert not world.alive and [env.closes for env in world.made] == [1]


def test_a_failure_of_make_env_is_typed():
    def make_env(key: str) -> Any:
        raise LookupError(f"no level {key}")

    make_env.blocking = False  # type: ignore[attr-defined]
    with pytest.raises(DataError, match="make_env raised LookupError: no level k"):
        virtual(EnvManager(make_env, FakePolicy()).run("k", 0))


def test_stamped_once_with_the_first_version():
    ticket = FakeTicket(FakeBuffer([]), 5, "k")
    world = World(turns=4)
    trajectory = play(world, FakePolicy(version=8), ticket)
    assert ticket.version == 8 and trajectory.id == "5"


def test_stamped_before_the_step():
    ticket = FakeTicket(FakeBuffer([]), 5, "k")
    with pytest.raises(DeadlineExceeded):
        play(World(step=FOREVER), FakePolicy(version=8), ticket, step_timeout=5.0)
    assert ticket.version == 8


@pytest.mark.parametrize(("limits", "kind", "turns"), [({"max_turns": 2}, "max_turns", 2), ({}, "terminated", 3)])
def test_outcomes(limits, kind, turns):
    trajectory = play(World(turns=3), **limits)
    assert (trajectory.outcome.kind, len(trajectory.turns)) == (kind, turns)


def test_truncation_is_not_termination():
    assert play(World(step=("o", 0.0, False, True, {}))).outcome.kind == "truncated"
    assert play(World(step=("o", 0.0, True, True, {}))).outcome.kind == "terminated"


class Stops(FakePolicy):
    """Stops at its n-th turn."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    async def act(self, episode: Any) -> Any:
        return None if len(episode.turns) == self.at else await super().act(episode)


def test_a_policy_may_stop_but_not_before_it_began():
    assert play(World(turns=9), Stops(2)).outcome.kind == "stopped"
    with pytest.raises(DataError, match="before its first action"):
        play(World(), Stops(0))


def test_an_action_that_contradicts_itself_is_the_policys_fault():
    class Wrong(FakePolicy):
        async def act(self, episode: Any) -> Any:
            return self.fault

    from envmanager import Action

    for action, said in [
        ("left", "returned str 'left'"),
        (Action(text="x", token_ids=[1], logprobs=[0.0] * 2), "1 tok"),
        (Action(text="\udc80"), "lone surrogates"),
        (Action(text=None), "text is NoneType None"),  # type: ignore[arg-type]
    ]:
        with pytest.raises(PolicyError, match=said):
            play(World(), Wrong(fault=action))


def test_one_episode_at_a_time():
    async def scenario() -> None:
        world = World()
        manager = EnvManager(world, FakePolicy())
        running = asyncio.create_task(manager.run("a", 0))
        await asyncio.sleep(1.5)
        assert (manager.phase, manager.since, manager.incarnation) == ("step", 1.0, 1)
        with pytest.raises(Busy, match="'a'"):
            await manager.run("b", 0)
        await running
        await manager.run("b", 0)
        assert manager.incarnation == 2 and len(world.made) == 2

    virtual(scenario())


@pytest.mark.parametrize("when", [0.5, 1.5, 2.5])
def test_cancellation_reaches_policy_and_environment(when):
    world, policy = World(reset_s=1.0), FakePolicy()

    async def scenario() -> None:
        running = asyncio.create_task(EnvManager(world, policy).run("a", 0))
        await asyncio.sleep(when)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    virtual(scenario())
    assert not world.alive and [env.closes for env in world.made] == [1]
    assert policy.cancelled == (when == 1.5)


def test_a_phase_that_was_cut_short_is_in_the_trace():
    spans: list[Any] = []
    with pytest.raises(DeadlineExceeded):
        play(World(step=FOREVER), step_timeout=9.0, observer=lambda *span: spans.append((span[0], *span[2:])))
    assert spans == [("reset", 0.0, 0.0), ("generate", 0.0, 1.0), ("step", 1.0, 10.0)]


def test_a_close_that_hangs_or_fails_ends_in_kill(caplog):
    world = World(turns=1, close_s=FOREVER)
    assert play(world, close_timeout=3.0).outcome.kind == "terminated"
    assert not world.alive and "close took longer than 3.0 s" in caplog.text
