"""Tasks are drawn by weight, and each plays, scores and limits its own."""

from __future__ import annotations

from collections import Counter
from itertools import count, islice
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rollart.tasks import Mixture, split


class Counting:
    """A task whose keys are numbers."""

    blocking = False

    def __init__(self, worth: float = 0.0) -> None:
        self.worth = worth
        self.settings: Any = worth

    def train_keys(self, seed: int):
        return (str(seed + number) for number in count())

    def eval_keys(self, n: int) -> list[str]:
        return [f"e{number}" for number in range(n)]

    def make_env(self, key: str) -> Any:
        return SimpleNamespace(task="its own name", key=key, blocking=False, reset=None, step=None)

    async def reward(self, trajectory: Any) -> float:
        return self.worth

    async def close(self) -> None:
        pass

    def probe_prompts(self, n: int) -> list[list[int]]:
        return []


@given(weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=5), drawn=st.integers(1, 300))
def test_every_task_keeps_within_one_of_its_share(weights: list[float], drawn: int) -> None:
    named = {f"t{i}": weight for i, weight in enumerate(weights)}
    mixture = Mixture({name: Counting() for name in named}, named)
    counts: Counter[str] = Counter()
    for number, key in enumerate(islice(mixture.train_keys(7), drawn), 1):
        counts[split(key)[0]] += 1
        for name, weight in named.items():
            assert abs(counts[name] - number * weight / sum(weights)) < len(weights)


def test_keys_are_the_same_at_every_start_and_each_tasks_own_in_order() -> None:
    mixture = Mixture({"a": Counting(), "b": Counting()}, {"a": 2.0, "b": 1.0})
    keys = list(islice(mixture.train_keys(3), 6))
    assert keys == list(islice(mixture.train_keys(3), 6))
    assert [key for key in keys if key.startswith("a/")] == ["a/3", "a/4", "a/5", "a/6"]
    assert [key for key in keys if key.startswith("b/")] == ["b/3", "b/4"]


def test_each_task_is_evaluated_by_its_share_and_at_least_once() -> None:
    mixture = Mixture({"a": Counting(), "b": Counting(), "rare": Counting()}, {"a": 60, "b": 40, "rare": 0.001})
    counts = Counter(split(key)[0] for key in mixture.eval_keys(50))
    assert counts == {"a": 30, "b": 20, "rare": 1}


async def test_an_environment_says_the_tasks_name_and_its_task_scores_it() -> None:
    mixture = Mixture({"a": Counting(1.0), "b": Counting(2.0)}, {"a": 1, "b": 1})
    env: Any = mixture.make_env("b/17/x")
    assert (env.task, env.key, env.blocking) == ("b", "17/x", False)
    trajectory: Any = SimpleNamespace(key="b/17/x", task="b")
    assert await mixture.reward(trajectory) == 2.0
