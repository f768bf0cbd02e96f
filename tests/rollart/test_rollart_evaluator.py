"""An evaluation plays every key once; a failed episode is left out, never a zero."""

from __future__ import annotations

from typing import Any

import pytest

from envmanager import Action, Episode, Limits, Span, Starved, nonblocking
from rollart.pipeline.evaluator import Evaluator


class Coin:
    """Pays what its key says; a broken one raises."""

    blocking = False

    def __init__(self, key: str) -> None:
        self.key = key

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        if self.key == "broken":
            raise RuntimeError("no such lake")
        return "flip", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", float(self.key == "win"), True, False, {}


class Flipper:
    def __init__(self, prefix: str, seen: list[str]) -> None:
        self.prefix = prefix
        self.seen = seen

    async def act(self, episode: Episode) -> Action:
        self.seen.append(self.prefix + episode.id)
        return Action(text="x", token_ids=[1], logprobs=[0.0], spans=[Span(0, 0, 1)], prompt_ids=[0])


def evaluator(keys: list[str], seen: list[str]) -> Evaluator:
    limits = Limits(max_turns=3, reset_retries=0)
    make_env = nonblocking(lambda key: Coin(key))
    return Evaluator(make_env, lambda prefix: Flipper(prefix, seen), keys, concurrency=4, limits=limits)


async def test_the_rate_is_over_the_keys_and_rounds_have_names_of_their_own() -> None:
    seen: list[str] = []
    subject = evaluator(["win", "lose", "win", "win"], seen)
    assert await subject.success() == 0.75
    assert await subject.success() == 0.75
    assert len(seen) == len(set(seen)) == 8


async def test_a_failure_is_left_out_of_the_mean() -> None:
    assert await evaluator(["win", "broken", "lose"], []).success() == 0.5


async def test_when_all_fail_it_says_so() -> None:
    with pytest.raises(Starved):
        await evaluator(["broken", "broken"], []).success()
