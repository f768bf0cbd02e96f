"""Slowness on purpose, for benchmarks and tests of what overlap hides."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterator, Sequence

from envmanager import Env, LatencyEnv, Trajectory
from rollart.policy import TurnSettings
from rollart.tasks.task import Task


class SlowTask:
    """A task whose turns take N(mean_s, std_s), clipped at 0, longer, and its rewards `reward_s`."""

    def __init__(self, task: Task, mean_s: float, std_s: float, reward_s: float) -> None:
        self._task = task
        self._mean_s = mean_s
        self._std_s = std_s
        self._reward_s = reward_s

    @property
    def settings(self) -> TurnSettings:
        return self._task.settings

    @property
    def blocking(self) -> bool:
        return self._task.blocking

    def train_keys(self, seed: int) -> Iterator[str]:
        return self._task.train_keys(seed)

    def eval_keys(self, n: int) -> list[str]:
        return self._task.eval_keys(n)

    def make_env(self, key: str) -> Env:
        return LatencyEnv(self._task.make_env(key), self._mean_s, self._std_s, seed=zlib.crc32(key.encode()))

    async def reward(self, trajectory: Trajectory) -> float:
        await asyncio.sleep(self._reward_s)
        return await self._task.reward(trajectory)

    async def close(self) -> None:
        await self._task.close()

    def probe_prompts(self, n: int) -> Sequence[list[int]]:
        return self._task.probe_prompts(n)
