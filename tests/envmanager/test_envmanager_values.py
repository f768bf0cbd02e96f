"""Values travel through files unchanged, and bad limits are refused with a reason."""

import math

import msgspec
import pytest

from envmanager import Action, Limits, Outcome, Span, Timings, Trajectory, Turn


def trajectory() -> Trajectory:
    turn = Turn(
        observation="å",
        action="left",
        prompt_ids=[1, 2],
        token_ids=[3],
        logprobs=[-0.5],
        spans=[Span(4, 0, 1)],
        new_segment=True,
        reward=0.25,
        generate_at=1.0,
        generate_s=2.0,
        env_at=3.0,
        env_s=0.5,
    )
    return Trajectory(
        id="7",
        key="k",
        seed=3,
        task="t",
        turns=[turn, turn],
        reward=0.5,
        outcome=Outcome("terminated", 2),
        timings=Timings(started=0.0, reset_s=1.0, ended=4.0),
        metadata={"success": True, "board": ["x", 1]},
    )


@pytest.mark.parametrize("codec", [msgspec.msgpack, msgspec.json])
def test_round_trip(codec):
    assert codec.decode(codec.encode(trajectory()), type=Trajectory) == trajectory()
    assert trajectory().tokens == 2


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"max_turns": 0}, "max_turns is 0"),
        ({"step_timeout": 0.0}, "step_timeout is 0"),
        ({"reset_timeout": -1.0}, "reset_timeout is -1"),
        ({"episode_timeout": math.inf}, "None for no bound"),
        ({"turn_timeout": math.nan}, "turn_timeout is nan"),
        ({"reset_retries": -1}, "reset_retries is -1"),
    ],
)
def test_bad_limits_name_the_field(wrong, named):
    with pytest.raises(ValueError, match=named):
        Limits(**wrong)


def test_defaults_are_not_shared():
    first, second = Action(text="a"), Action(text="b")
    first.token_ids.append(1)
    assert second.token_ids == []
