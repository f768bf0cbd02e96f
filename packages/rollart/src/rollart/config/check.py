"""What several configuration keys promise together, checked before anything starts.

Each refusal names the key, its value, the reason and an alternative that works.
Held by tests/rollart/test_rollart_config.py.
"""

from __future__ import annotations

import difflib
import os
from collections import Counter
from typing import Any, get_args

import msgspec

from envmanager import UnknownEnv
from rollart.algorithms import LossName, own_loss
from rollart.config.fits import check_fits
from rollart.config.schema import Config
from rollart.config.tasks import AnyTask, FrozenLakeConfig
from rollart.errors import ConfigError
from rollart.models.tiny import TinyQwen3
from rollart.models.vocabulary import VOCABULARIES, Vocabulary
from rollart.pipeline.modes import MODES
from rollart.trainers.layout import check_layout, gpu_count
from rollart.trainers.model_folder import ModelFolder, ModelShape


def check(config: Config) -> None:
    """Raise ConfigError for the first combination that cannot run."""
    _check_paths(config)
    _check_tasks(config)
    _check_hardware(config)
    shape = _shape(config)
    _check_training(config, shape)
    check_fits(config, shape)


def _check_paths(config: Config) -> None:
    for key, value in (("run.folder", config.run.folder), ("model.path", config.model.path)):
        if value.startswith("~"):
            raise ConfigError(key, value, f"~ is not expanded here; write {os.path.expanduser(value)}")


def observation_tokens(task: FrozenLakeConfig) -> int:
    """Tokens of one observation: rows of cells with a newline each, and a prompt mark."""
    side = task.view or task.size
    return side * (side + 1) + 1


def least_context(task: AnyTask) -> int:
    """Tokens that a turn of the task needs at least."""
    if isinstance(task, FrozenLakeConfig):
        return observation_tokens(task) + task.actions_per_turn
    return 1 + task.max_tokens


def _check_tasks(config: Config) -> None:
    if not config.tasks:
        raise ConfigError("tasks", {}, "there is nothing to learn; name one, such as tasks: {FrozenLake: {size: 4}}")
    have = config.generation.max_model_len
    for name, task in config.tasks.items():
        if isinstance(task, FrozenLakeConfig) and task.view is not None and task.view % 2 == 0:
            raise ConfigError(f"tasks.{name}.view", task.view, f"must be odd; {task.view + 1} works")
        if (need := least_context(task)) > have:
            reason = f"one turn of task {name} needs {need} tokens; set it to at least {need}"
            raise ConfigError("generation.max_model_len", have, reason)
    for name in config.generation.affinity.keys() - config.tasks.keys() - {"default"}:
        close = difflib.get_close_matches(name, config.tasks, n=1)
        hint = f"did you mean {close[0]}?" if close else f"tasks are {', '.join(config.tasks)}"
        raise ConfigError(f"generation.affinity.{name}", config.generation.affinity[name], f"no such task; {hint}")
    symbols = [name for name, task in config.tasks.items() if isinstance(task, FrozenLakeConfig)]
    if not config.model.path and 0 < len(symbols) < len(config.tasks):
        reason = f"the tiny model speaks symbols ({symbols[0]}) or text, not both; name a model folder"
        raise ConfigError("model.path", "", reason)


def _check_hardware(config: Config) -> None:
    generation = config.generation
    if len(generation.hardware) not in (1, generation.workers):
        reason = f"give one class for all, or one for each of the {generation.workers} workers"
        raise ConfigError("generation.hardware", generation.hardware, reason)
    if not config.pools:
        raise ConfigError("pools", [], "there is nothing to run on; [{name: local, hardware: cpu, total: 512}] works")
    name, count = Counter(pool.name for pool in config.pools).most_common(1)[0]
    if count > 1:
        raise ConfigError("pools", name, f"{count} are named {name}; give each a name of its own")
    if generation.proxies > config.rollout.concurrency:
        most = config.rollout.concurrency
        reason = f"each serves a share of the {most} environments of rollout.concurrency; {most} or fewer work"
        raise ConfigError("generation.proxies", generation.proxies, reason)
    classes = {pool.hardware for pool in config.pools}
    named = [("generation.hardware", name) for name in generation.hardware]
    named += [(f"generation.affinity.{task}", name) for task, name in generation.affinity.items()]
    for key, hardware in named:
        if hardware not in classes:
            reason = f"no pool has this hardware class; pools offer {', '.join(sorted(classes))}"
            raise ConfigError(key, hardware, reason)
    # A unit for each engine, each rank of the trainer, the environments and the rewards.
    needed, offered = generation.workers + config.train.processes + 2, sum(pool.total for pool in config.pools)
    if offered < needed:
        raise ConfigError("pools", offered, f"the pools hold {offered:g} units in all, the roles ask for {needed}")
    if "default" not in generation.affinity:
        raise ConfigError("generation.affinity", generation.affinity, "needs an entry named default")


def _check_training(config: Config, shape: ModelShape) -> None:
    if config.buffer.group_size < 2 and config.buffer.drop_uniform:
        reason = "the rewards of a group of one are always equal; use 2 or more, or buffer.drop_uniform=false"
        raise ConfigError("buffer.group_size", config.buffer.group_size, reason)
    _check_loss(config.train.objective.loss)
    check_layout(config.train, shape, trajectories=config.buffer.batch_groups * config.buffer.group_size)
    if config.generation.gpus:
        check_gpus(config, gpu_count())
    _check_minibatches(config)
    mode = MODES[config.run.mode]
    if mode.hold and config.buffer.alpha > 0:
        reason = f"in mode {mode.name} a batch is generated by one version: set it to 0, or run.mode to rollart"
        raise ConfigError("buffer.alpha", config.buffer.alpha, reason)
    batch = (config.buffer.batch_groups + config.buffer.spare_groups) * (
        config.buffer.group_size + config.buffer.spare_members
    )
    if mode.lockstep and config.rollout.concurrency < batch:
        reason = f"in mode {mode.name} a whole batch steps together: set it to at least {batch}"
        raise ConfigError("rollout.concurrency", config.rollout.concurrency, reason)


def _check_loss(loss: str) -> None:
    names = get_args(LossName)
    if loss in names:
        return
    if ":" not in loss:
        close = difflib.get_close_matches(loss, names, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        reason = f"must be one of {', '.join(names)}, or module:function of your own{hint}"
        raise ConfigError("train.objective.loss", loss, reason)
    try:
        own_loss(loss)
    except UnknownEnv as error:
        raise ConfigError("train.objective.loss", loss, str(error)) from None


def check_gpus(config: Config, gpus: int) -> None:
    """Raise ConfigError unless engines and trainer fit the GPUs that this machine has."""
    each, workers, train = config.generation.gpus, config.generation.workers, config.train
    if not gpus:
        raise ConfigError("generation.gpus", each, "this machine has no GPU that torch can use; 0 (the CPU) works")
    if each > 1 and each != int(each):
        raise ConfigError("generation.gpus", each, f"above 1 it counts tensor-parallel ranks; {int(each)} works")
    training = train.processes * train.gpus if train.device == "cuda" else 0.0
    if each * workers + training > gpus:
        reason = (
            f"{workers} engines and the trainer's {training:g} take {each * workers + training:g} GPUs, and this "
            f"machine has {gpus}; lower it, generation.workers or train.gpus"
        )
        raise ConfigError("generation.gpus", each, reason)


def _check_minibatches(config: Config) -> None:
    """A minibatch holds one of what it never cuts at least."""
    train, groups = config.train, config.buffer.batch_groups
    most = groups if train.minibatch_of == "groups" else groups * config.buffer.group_size
    if train.minibatches > most:
        reason = f"a batch has {most} {train.minibatch_of}, and a minibatch holds one at least; {most} works"
        raise ConfigError("train.minibatches", train.minibatches, reason)
    longest = max(map(least_context, config.tasks.values()))
    if train.micro_tokens < longest:
        reason = f"one turn has up to {longest} tokens, and a micro-batch holds one row at least; {longest} works"
        raise ConfigError("train.micro_tokens", train.micro_tokens, reason)


def _shape(config: Config) -> ModelShape:
    """The model's, or that of the tiny one that will be made."""
    if config.model.path:
        return ModelFolder.read(config.model.path).shape
    tiny = TinyQwen3(seed=0, hidden=config.model.hidden, layers=config.model.layers, heads=config.model.heads)
    if tiny.heads % tiny.kv_heads:
        works = max(tiny.kv_heads, tiny.heads // tiny.kv_heads * tiny.kv_heads)
        reason = f"the tiny model has {tiny.kv_heads} key-value heads, of which it must be a multiple; {works} works"
        raise ConfigError("model.heads", tiny.heads, reason)
    return ModelShape(
        model_type="qwen3",
        vocab_size=len(VOCABULARIES[vocabulary(config)]),
        hidden_size=tiny.hidden,
        num_hidden_layers=tiny.layers,
        num_attention_heads=tiny.heads,
        num_key_value_heads=tiny.kv_heads,
        intermediate_size=tiny.intermediate,
        head_dim=tiny.head_dim,
    )


def vocabulary(config: Config) -> Vocabulary:
    """What the tiny model speaks."""
    return "symbols" if all(isinstance(task, FrozenLakeConfig) for task in config.tasks.values()) else "bytes"


# What a checkpoint's contents depend on: these keys cannot change between a run and its continuation.
_FIXED = (
    "run.seed",
    "run.mode",
    "train.backend",
    "model.path",
    "model.hidden",
    "model.layers",
    "model.heads",
    "buffer.group_size",
    "buffer.batch_groups",
    "buffer.alpha",
    "buffer.spare_groups",
    "buffer.spare_members",
)


# Keys of a task that may: they change how long an episode may take, not what it is.
_LIMITS = ("max_turns", "step_timeout_s", "episode_timeout_s", "latency_mean_s", "latency_std_s", "reward_latency_s")


def check_resumable(config: Config, stored: Config) -> None:
    """Raise ConfigError when `config` cannot continue a run that was started with `stored`."""
    changed = [key for key in differing(config, stored) if _fixed(key)]
    if changed:
        now, then = (_at(c, changed[0]) for c in (config, stored))
        raise ConfigError(changed[0], now, f"the run was started with {then!r}; keep that, or use --overwrite")


def _fixed(key: str) -> bool:
    section, _, rest = key.partition(".")
    return key in _FIXED or (section == "tasks" and rest.rpartition(".")[2] not in _LIMITS)


def _at(value: Any, key: str) -> Any:
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part)
    return value


def differing(one: msgspec.Struct, other: msgspec.Struct, prefix: str = "") -> list[str]:
    """The dotted keys in which two configurations differ."""
    keys: list[str] = []
    for name in one.__struct_fields__:
        keys += _differing(getattr(one, name), getattr(other, name), f"{prefix}{name}")
    return keys


def _differing(ours: Any, theirs: Any, key: str) -> list[str]:
    if isinstance(ours, msgspec.Struct) and type(ours) is type(theirs):
        return differing(ours, theirs, f"{key}.")
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return [
            found
            for name in {**ours, **theirs}
            for found in _differing(ours.get(name), theirs.get(name), f"{key}.{name}")
        ]
    return [] if ours == theirs else [key]
