"""Any environment that envmanager knows by name, as a task: free text in a chat format.

Invariant: keys of training and evaluation differ, and so do the seeds that envmanager makes of them
(tests/rollart/test_rollart_environment.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from envmanager import Env, MakeEnv, RewardClient, Trajectory
from envmanager.host import blocks
from rollart.policy import TurnSettings


class EnvironmentTask:
    """Plays what `make` makes. `reward` scores a trajectory; None takes the sum of the environment's rewards."""

    def __init__(
        self, settings: TurnSettings, make: MakeEnv, *, reward: RewardClient | None = None, probes: Sequence[str]
    ) -> None:
        """`probes` are texts as the environment may show them."""
        self.settings = settings
        self.blocking = blocks(make)
        self._make = make
        self._reward = reward
        self._probes = probes

    def train_keys(self, seed: int) -> Iterator[str]:
        return (f"train-{seed}-{number}" for number in count())

    def eval_keys(self, n: int) -> list[str]:
        return [f"eval-{number}" for number in range(n)]

    def make_env(self, key: str) -> Env:
        env: Any = self._make(key)
        return env

    async def reward(self, trajectory: Trajectory) -> float:
        if self._reward is not None:
            return await self._reward(trajectory)
        return sum(turn.reward for turn in trajectory.turns)

    async def close(self) -> None:
        for part in (self._make, self._reward):
            if close := getattr(part, "close", None):
                await close()

    def probe_prompts(self, n: int) -> list[list[int]]:
        return [self.settings.format.observation(text, None) for text in self._probes[:n]]
