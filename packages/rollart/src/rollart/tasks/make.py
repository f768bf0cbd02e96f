"""From configuration to tasks."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping

from envmanager import RewardClient, UnknownEnv
from envmanager.naming import imported
from envmanager.rewards import LocalReward, URLReward
from llmproxy import Sampling
from rollart.chat import Codec, Format, make_format
from rollart.config.tasks import AnyTask, EnvConfig, FrozenLakeConfig
from rollart.errors import ConfigError
from rollart.policy import TurnSettings
from rollart.tasks.environment import EnvironmentTask
from rollart.tasks.frozenlake import FrozenLakeTask
from rollart.tasks.lakes import LakeTask
from rollart.tasks.mixture import Mixture
from rollart.tasks.places import is_url, place
from rollart.tasks.slow import SlowTask
from rollart.tasks.task import Task

# What any environment may show; the engines' answers to it are compared with the trainer's.
_PROBES = ("You are in a room.", "1 + 2 = ?", "Observation: nothing happened.", "Name a number between 1 and 9.")

# A function server that is started again costs no episode within about half a minute.
_RETRIES = 5


def make_tasks(configs: Mapping[str, AnyTask], codec: Codec, context: int) -> Mixture:
    """The tasks of a run; `context` is how many tokens a segment may hold. Raises ConfigError naming the key."""
    tasks = {name: _make(name, config, codec, context) for name, config in configs.items()}
    return Mixture(tasks, {name: config.weight for name, config in configs.items()})


def check_tasks(configs: Mapping[str, AnyTask], codec: Codec | None = None) -> None:
    """Raise ConfigError for an environment or a reward that this process cannot import, and for what the given
    tokenizer cannot say, before anything is made."""
    for name, config in configs.items():
        if isinstance(config, FrozenLakeConfig) and codec is not None:
            _lake(name, config, codec, context=0)
        if not isinstance(config, EnvConfig):
            continue
        if codec is not None:
            _format(name, config, codec)
        if config.reward and not is_url(config.reward):
            _reward(name, config.reward)
        if not (config.isolate or config.python or is_url(config.env)):
            place(name, config)


def _make(name: str, config: AnyTask, codec: Codec, context: int) -> Task:
    task: Task
    if isinstance(config, FrozenLakeConfig):
        task = _lake(name, config, codec, context)
    elif isinstance(config, EnvConfig):
        task = _environment(name, config, codec, context)
    else:
        task = _own(name, config, codec, context)
    if config.latency_mean_s or config.latency_std_s or config.reward_latency_s:
        return SlowTask(task, config.latency_mean_s, config.latency_std_s, config.reward_latency_s)
    return task


def _lake(name: str, config: FrozenLakeConfig, codec: Codec, context: int) -> Task:
    lakes = FrozenLakeTask(size=config.size, frozen=config.frozen, max_turns=config.max_turns, view=config.view)
    try:
        return LakeTask(name, lakes, codec, symbols=config.actions_per_turn, context=context)
    except ValueError as error:
        raise ConfigError("model.path", name, str(error)) from None


def _own(name: str, config: AnyTask, codec: Codec, context: int) -> Task:
    """A task of somebody's own class, whose `Config` the keys are."""
    try:
        task: Task = imported(config.kind)(name, config, codec, context)
    except ValueError as error:
        raise ConfigError(f"tasks.{name}", config.kind, str(error)) from None
    return task


def _format(name: str, config: EnvConfig, codec: Codec) -> Format:
    try:
        return make_format(codec, config.chat, system=config.system, tools=config.tools)
    except ValueError as error:
        raise ConfigError(f"tasks.{name}.chat", config.chat, f"{error}; chat: plain needs none") from None


def _environment(name: str, config: EnvConfig, codec: Codec, context: int) -> Task:
    written = _format(name, config, codec)
    settings = TurnSettings(
        task=name,
        format=written,
        max_tokens=config.max_tokens,
        sampling=Sampling(stop_token_ids=written.stop_token_ids),
        latest_only=config.latest_only,
        context=context,
    )
    reward = _reward(name, config.reward)
    return EnvironmentTask(settings, place(name, config), reward=reward, probes=_PROBES)


def _reward(name: str, where: str) -> RewardClient | None:
    if not where:
        return None
    if is_url(where):
        token = os.environ.get("ROLLART_SERVE_TOKEN", "")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return URLReward(where, retries=_RETRIES, headers=headers)
    try:
        function = imported(where)
    except UnknownEnv as error:
        raise ConfigError(f"tasks.{name}.reward", where, str(error)) from None
    scores: RewardClient = function if inspect.iscoroutinefunction(function) else LocalReward(function)
    return scores
