"""The task side of a run: its tasks as one mixture, and the model that plays them.

Invariant: training and evaluation keys never share an instance; each task sees to that
(tests/rollart/test_rollart_frozenlake.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from envmanager import Limits, MakeEnv, nonblocking
from llmproxy import Sampling
from rollart.chat import Codec
from rollart.config import Config
from rollart.config.check import vocabulary
from rollart.errors import ConfigError
from rollart.models import make_tiny_qwen3
from rollart.policy import TurnSettings
from rollart.tasks import Mixture, make_tasks, split

# A probe compares probabilities token by token: a few tokens prove as much as many.
_PROBE_TOKENS = 8


class Probe(msgspec.Struct, frozen=True):
    """Prompts on which engines and trainer are compared, and how the engines answer them."""

    prompts: list[list[int]]
    max_tokens: int
    sampling: Sampling


class Setting:
    """What is played. Raises ConfigError for a task that cannot be made with this model."""

    def __init__(self, config: Config, model: Path, tasks: Mixture | None = None) -> None:
        """`tasks` where they are made elsewhere; then the model's tokenizer is not needed."""
        self.model = model
        self.tasks = tasks or make_tasks(config.tasks, codec_of(model), config.generation.max_model_len)
        self.eval_keys = self.tasks.eval_keys(config.eval.episodes)
        self._seed = config.run.seed
        self._settings = self.tasks.settings
        self._limits = {name: _limits(config, name) for name in config.tasks}
        make = self.tasks.make_env
        self.make_env: MakeEnv = make if self.tasks.blocking else nonblocking(lambda key: make(key))

    async def close(self) -> None:
        """Ends what the tasks run: processes of environments, connections to servers."""
        await self.tasks.close()

    @property
    def allowed(self) -> dict[str, Sequence[int]]:
        """The token ids that each task's generations are limited to; none for the whole vocabulary."""
        return {name: turn.sampling.allowed_token_ids or () for name, turn in self._settings.items()}

    def settings(self, key: str) -> TurnSettings:
        """How turns of a key's task are generated."""
        return self._settings[split(key)[0]]

    def limits(self, key: str) -> Limits:
        """The bounds of a key's episode."""
        return self._limits[split(key)[0]]

    def probe(self, prompts: int) -> Probe:
        """Prompts of the first task."""
        first = next(iter(self.tasks.tasks.values()))
        turn = first.settings
        tokens = min(turn.max_tokens, _PROBE_TOKENS)
        # The end of a prompt that would leave no room to answer proves as much.
        return Probe([ids[tokens - turn.context :] for ids in first.probe_prompts(prompts)], tokens, turn.sampling)

    def train_keys(self) -> Iterator[str]:
        """The endless keys of this run, the same at every start."""
        return self.tasks.train_keys(self._seed)


def codec_of(model: Path) -> Codec:
    """The tokenizer of a model's folder. Raises ConfigError when it cannot be loaded."""
    from transformers import AutoTokenizer

    try:
        return Codec(AutoTokenizer.from_pretrained(str(model), local_files_only=True))
    except Exception as error:  # of whatever type the tokenizer's library has
        said = " ".join(str(error).split())[:300]
        reason = f"its tokenizer cannot be loaded ({type(error).__name__}: {said}); copy its files again"
        raise ConfigError("model.path", str(model), reason) from None


def _limits(config: Config, name: str) -> Limits:
    rollout, task = config.rollout, config.tasks[name]
    return Limits(
        max_turns=task.max_turns,
        step_timeout=task.step_timeout_s or rollout.step_timeout_s,
        turn_timeout=rollout.turn_timeout_s,
        episode_timeout=task.episode_timeout_s or rollout.episode_timeout_s,
        reward_timeout=rollout.reward_timeout_s,
    )


def prepare_model(config: Config, folder: Path) -> Path:
    """The model folder of a run: the configured one, or a tiny model made in the run folder."""
    if config.model.path:
        return Path(config.model.path)
    model = config.model
    return make_tiny_qwen3(
        folder / "model",
        config.run.seed,
        hidden=model.hidden,
        layers=model.layers,
        heads=model.heads,
        max_length=max(1024, config.generation.max_model_len),
        vocabulary=vocabulary(config),
    )
