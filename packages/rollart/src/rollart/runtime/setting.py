"""The task side of a run: environments, keys, rewards, and how text becomes tokens.

Invariant: training and evaluation keys never share an instance; the task decides by content
(tests/rollart/test_rollart_frozenlake.py).
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from envmanager import Env, LatencyEnv, MakeEnv, Trajectory, nonblocking
from llmproxy import Sampling
from rollart.config import Config
from rollart.errors import ConfigError
from rollart.models import make_tiny_qwen3
from rollart.policy import Codec, GenerationSettings
from rollart.tasks import FrozenLakeTask


class Setting:
    """FrozenLake as a configuration describes it."""

    def __init__(self, config: Config, model: Path) -> None:
        from transformers import AutoTokenizer

        task = config.task
        self._config = config
        self.model = model
        self._task = FrozenLakeTask(size=task.size, frozen=task.frozen, max_turns=task.max_turns, view=task.view)
        self.codec = Codec(AutoTokenizer.from_pretrained(str(model), local_files_only=True))
        actions = tuple(self._action_token(action) for action in self._task.actions)
        self.generation = GenerationSettings(
            task=self._task.name,
            max_tokens=task.actions_per_turn,
            sampling=Sampling(allowed_token_ids=actions, ignore_eos=True, logprobs="processed"),
            latest_only=True,
        )
        self.make_env: MakeEnv = nonblocking(lambda key: self._make_env(key))

    def _action_token(self, action: str) -> int:
        tokens = self.codec.encode(action)
        if len(tokens) != 1:
            reason = f"its tokenizer makes {len(tokens)} tokens of the action {action!r}; it must be one"
            raise ConfigError("model.path", str(self.model), reason)
        return tokens[0]

    @property
    def allowed(self) -> dict[str, Sequence[int]]:
        """The token ids that each task's generations are limited to."""
        return {self.generation.task: self.generation.sampling.allowed_token_ids or ()}

    def train_keys(self) -> Iterator[str]:
        """The endless keys of this run, the same at every start."""
        return self._task.train_keys(self._config.run.seed)

    def eval_keys(self, count: int) -> list[str]:
        """Held-out keys, the same for every run."""
        return self._task.eval_keys(count)

    def probe_prompts(self, count: int) -> list[list[int]]:
        """First observations of held-out instances, as tokens."""
        envs = map(self._task.make_env, self.eval_keys(count))
        return [self.codec.encode(env.reset(seed=0)[0]) for env in envs]

    async def reward(self, trajectory: Trajectory) -> float:
        """What the environment paid over the episode."""
        if self._config.task.reward_latency_s:
            await asyncio.sleep(self._config.task.reward_latency_s)
        return sum(turn.reward for turn in trajectory.turns)

    def _make_env(self, key: str) -> Env:
        env: Any = self._task.make_env(key)
        task = self._config.task
        if task.latency_mean_s or task.latency_std_s:
            return LatencyEnv(env, task.latency_mean_s, task.latency_std_s, seed=zlib.crc32(key.encode()))
        return env


def prepare_model(config: Config, folder: Path) -> Path:
    """The model folder of a run: the configured one, or a tiny model made in the run folder."""
    if config.model.path:
        return Path(config.model.path)
    model = config.model
    return make_tiny_qwen3(
        folder / "model", config.run.seed, hidden=model.hidden, layers=model.layers, heads=model.heads
    )
