"""Several tasks as one: groups are drawn in proportion to the tasks' weights.

Invariants (tests/rollart/test_rollart_mixture.py):
- after any number of keys each task's count is within one of its share, and the order is the same at every start;
- a key `NAME/KEY` is played, scored and limited by its own task.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from envmanager import Env, Trajectory
from rollart.policy import TurnSettings
from rollart.tasks.task import Task


class Mixture:
    """Named tasks with weights. Each trajectory's `task` is the name."""

    def __init__(self, tasks: Mapping[str, Task], weights: Mapping[str, float]) -> None:
        self.tasks = dict(tasks)
        total = sum(weights[name] for name in tasks)
        self._shares = {name: weights[name] / total for name in tasks}

    @property
    def settings(self) -> dict[str, TurnSettings]:
        """How each task's turns are generated."""
        return {name: task.settings for name, task in self.tasks.items()}

    @property
    def blocking(self) -> bool:
        """True when making an environment may hold up the event loop."""
        return any(task.blocking for task in self.tasks.values())

    def train_keys(self, seed: int) -> Iterator[str]:
        """The endless keys of a training run: always the next of the task that is furthest behind its share."""
        keys = {name: task.train_keys(seed) for name, task in self.tasks.items()}
        behind = dict.fromkeys(keys, 0.0)
        while True:
            for name, share in self._shares.items():
                behind[name] += share
            name = max(behind, key=behind.__getitem__)
            behind[name] -= 1.0
            yield f"{name}/{next(keys[name])}"

    def eval_keys(self, n: int) -> list[str]:
        """Held-out keys, each task's share of `n` and at least one, the same for every run."""
        return [
            f"{name}/{key}"
            for name, task in self.tasks.items()
            for key in task.eval_keys(max(1, round(n * self._shares[name])))
        ]

    def make_env(self, key: str) -> Env:
        """The environment of a key, which says the task's name."""
        name, own = split(key)
        env: Any = _Named(self.tasks[name].make_env(own), name)
        return env

    async def reward(self, trajectory: Trajectory) -> float:
        return await self.tasks[split(trajectory.key)[0]].reward(trajectory)

    async def close(self) -> None:
        """Ends what the tasks run."""
        for task in self.tasks.values():
            await task.close()


class _Named:
    """An environment under its task's name, whatever it calls itself."""

    def __init__(self, env: Env, task: str) -> None:
        self._env = env
        self.task = task
        self.reset, self.step = env.reset, env.step  # looked up each turn, and `__getattr__` is slow

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)


def split(key: str) -> tuple[str, str]:
    """A mixture's key as the task's name and the task's own key."""
    name, _, own = key.partition("/")
    return name, own
