"""Tasks as their profiles describe them: environments, rewards, and text that stands for tokens.

An observation is the text `TOKENS REPLY INSTANCE`: how many tokens it is, how many the model will answer with, and a
number that the members of a group share. Episodes are a function of the run's seed, the key and the episode's number
under its key, so modes that play the same keys see the same episodes (tests/rollart/test_rollart_simulate_tasks.py).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count
from math import exp, log, sqrt
from random import Random
from typing import Any
from zlib import crc32

from envmanager import InfrastructureError, Trajectory
from llmproxy import Sampling
from rollart.policy import TurnSettings
from rollart.simulate.blank import Blank
from rollart.simulate.catalog import Profile
from rollart.simulate.recorded import Recorded
from rollart.simulate.rewards import Rewards
from rollart.simulate.spread import Sampler

_PROBE_TOKENS = 16


class Weather:
    """What all environments suffer from: faults of a simulation change it while it runs."""

    def __init__(self) -> None:
        self.reset_fails = 0.0
        self.slow = 1.0


class Counted:
    """The chat format of observations that are numbers."""

    stop_token_ids: tuple[int, ...] = ()

    def observation(self, text: str, previous: Sequence[int] | None) -> list[int]:
        return Blank(*map(int, text.split()))

    def action(self, token_ids: Sequence[int]) -> str:
        return ""


class _Samplers:
    """The distributions of a profile, ready to draw from."""

    def __init__(self, profile: Profile) -> None:
        self.turns: Sampler = profile.turns.sampler()
        self.prompt: Sampler = profile.prompt.sampler()
        self.observation: Sampler = profile.observation.sampler()
        self.response: Sampler = profile.response.sampler()
        self.reset_s: Sampler = profile.reset_s.sampler()
        self.step_s: Sampler = profile.step_s.sampler()
        self.failures = Failures(profile)
        self.sigma = sqrt(log(1 + profile.instance**2))


class Failures:
    """How often environments of a profile fail, and after how long."""

    def __init__(self, profile: Profile) -> None:
        self._resets, self._steps = profile.reset_fails, profile.step_fails
        self._reset_s: Sampler = profile.reset_fail_s.sampler()

    async def reset(self, random: Random, weather: Weather) -> None:
        """Raises InfrastructureError when this one does not start."""
        fails = max(self._resets, weather.reset_fails)
        if fails and random.random() < fails:
            await asyncio.sleep(weather.slow * self._reset_s(random))
            raise InfrastructureError("the environment did not start")

    def step(self, random: Random) -> None:
        """Raises InfrastructureError when this step loses the environment."""
        if self._steps and random.random() < self._steps:
            raise InfrastructureError("the environment was lost")


class ProfileEnv:
    """One episode."""

    blocking = False
    __slots__ = ("_draw", "_instance", "_left", "_profile", "_random", "_reward", "_scale", "_weather", "task")

    def __init__(
        self,
        task: str,
        profile: Profile,
        draw: _Samplers,
        weather: Weather,
        random: Random,
        scale: float,
        instance: int,
        reward: float | None,
    ) -> None:
        """`scale` is how much longer than others the replies to this instance are, `reward` what its members get."""
        self.task = task
        self._reward = reward
        self._instance = instance
        self._profile = profile
        self._draw = draw
        self._weather = weather
        self._random = random
        self._scale = scale
        self._left = max(1, round(draw.turns(random)))

    async def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        random, weather = self._random, self._weather
        await self._draw.failures.reset(random, weather)
        if wait := weather.slow * self._draw.reset_s(random):
            await asyncio.sleep(wait)
        return self._shown(self._draw.prompt(random)), {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        random = self._random
        if wait := self._weather.slow * self._draw.step_s(random):
            await asyncio.sleep(wait)
        self._draw.failures.step(random)
        self._left -= 1
        reward = float(random.random() < self._profile.success) if self._reward is None else self._reward
        if self._left:
            reward = 0.0
        return self._shown(self._draw.observation(random)), reward, not self._left, False, {}

    def _shown(self, tokens: float) -> str:
        reply = max(1, round(self._scale * self._draw.response(self._random)))
        return f"{max(1, round(tokens))} {reply} {self._instance}"


class RecordedEnv:
    """Plays an episode as it was recorded, and fails as often as the profile says."""

    blocking = False

    def __init__(
        self, task: str, episode: Recorded, failures: Failures, random: Random, weather: Weather, instance: int
    ) -> None:
        self.task = task
        self._episode = episode
        self._failures = failures
        self._random = random
        self._weather = weather
        self._instance = instance
        self._turn = 0

    async def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        await self._failures.reset(self._random, self._weather)
        await asyncio.sleep(self._weather.slow * self._episode.reset_s)
        return self._shown(), {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        turns = self._episode.turns
        await asyncio.sleep(self._weather.slow * turns[self._turn][2])
        self._failures.step(self._random)
        self._turn += 1
        last = self._turn == len(turns)
        return "1 1" if last else self._shown(), self._episode.reward if last else 0.0, last, False, {}

    def _shown(self) -> str:
        observation, reply, _ = self._episode.turns[self._turn]
        return f"{max(1, observation)} {max(1, reply)} {self._instance}"


class ProfileTask:
    """A task of the run, played by its profile."""

    blocking = False

    def __init__(
        self,
        name: str,
        profile: Profile,
        episodes: Sequence[Recorded],
        *,
        seed: int,
        max_tokens: int,
        context: int,
        weather: Weather,
        rewards: Rewards,
    ) -> None:
        self.settings = TurnSettings(
            task=name,
            format=Counted(),
            max_tokens=max_tokens,
            sampling=Sampling(),
            latest_only=profile.latest_only,
            context=context,
        )
        self._name = name
        self._profile = profile
        self._episodes = episodes
        self._draw = _Samplers(profile)
        self._reward_s = profile.reward_s.sampler()
        self._seed = seed
        self._weather = weather
        self._rewards = rewards
        self._played: Counter[str] = Counter()

    def train_keys(self, seed: int) -> Iterator[str]:
        return (f"train-{seed}-{number}" for number in count())

    def eval_keys(self, n: int) -> list[str]:
        return [f"eval-{number}" for number in range(n)]

    def make_env(self, key: str) -> Any:
        number = self._played[key]
        self._played[key] += 1
        random = Random(f"{self._seed}/{self._name}/{key}/{number}")
        instance = crc32(f"{self._name}/{key}".encode())
        if self._episodes:
            episode = random.choice(self._episodes)
            return RecordedEnv(self._name, episode, self._draw.failures, random, self._weather, instance)
        profile, sigma = self._profile, self._draw.sigma
        shared = Random(f"{self._seed}/{self._name}/{key}")
        scale = exp(shared.gauss(-sigma * sigma / 2, sigma)) if sigma else 1.0
        alike = profile.uniform and shared.random() < profile.uniform
        reward = float(shared.random() < profile.success) if alike else None
        return ProfileEnv(self._name, profile, self._draw, self._weather, random, scale, instance, reward)

    async def reward(self, trajectory: Trajectory) -> float:
        """What the environment paid, after the time that scoring takes."""
        seconds = self._reward_s(Random(f"{self._seed}/{trajectory.id}"))
        await self._rewards.score(seconds)
        return trajectory.reward

    async def close(self) -> None:
        """Nothing to end: all of it is simulated."""

    def probe_prompts(self, n: int) -> list[list[int]]:
        return [[0] * _PROBE_TOKENS for _ in range(n)]
