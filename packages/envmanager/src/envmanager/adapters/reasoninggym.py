"""Reasoning Gym's generated problems, one turn each (`reasoning-gym:leg_counting`). Needs the extra `reasoning-gym`.

Invariant: a seed is one problem, and its oracle answer scores 1
(test_envmanager_adapters.py::test_reasoning_gym_knows_its_answers).
"""

from typing import Any

import reasoning_gym as library
from reasoning_gym.utils import extract_answer

from envmanager.errors import UnknownEnv

ASK = "Write your final answer between <answer> and </answer>."


class Problem:
    """One problem. An answer without the tags is taken whole. Scoring may evaluate what the model wrote, so it does
    not run on the loop.
    """

    def __init__(self, name: str, config: dict[str, Any]) -> None:
        self.task = f"reasoning-gym:{name}"
        self._name = name
        self._config = config
        self._problems: Any = None
        self._problem: dict[str, Any] = {}

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self._problems = library.create_dataset(self._name, seed=seed or 0, size=1, **self._config)
        self._problem = self._problems[0]
        offered = [f"<answer>{word}</answer>" for word in ("0", "1", "2", "yes", "no")]
        return f"{self._problem['question']}\n\n{ASK}", {"actions": offered}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        answer = extract_answer(action) or action.strip()
        reward = self._problems.score_answer(answer=answer, entry=self._problem)
        return "", float(reward), True, False, {"answer": self._problem["answer"]}


class ReasoningGym:
    """Makes the problems of one dataset; `config` is the dataset's."""

    def __init__(self, name: str, **config: Any) -> None:
        self._name = name
        self._config = config
        try:
            library.create_dataset(name, seed=0, size=1, **config)
        except (ValueError, TypeError, AssertionError) as error:
            raise UnknownEnv(f"reasoning-gym:{name}: {error}") from error

    def __call__(self, key: str) -> Problem:
        return Problem(self._name, self._config)
