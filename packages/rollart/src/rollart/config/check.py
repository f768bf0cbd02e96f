"""What several configuration keys promise together, checked before anything starts.

Each refusal names the key, its value, the reason and an alternative that works.
Held by tests/rollart/test_rollart_config.py.
"""

from __future__ import annotations

import math
from operator import attrgetter
from pathlib import Path

import msgspec

from rollart.config.schema import Config
from rollart.errors import ConfigError


def check(config: Config) -> None:
    """Raise ConfigError for the first combination that cannot run."""
    _check_finite(config)
    _check_context(config)
    if config.task.view is not None and config.task.view % 2 == 0:
        raise ConfigError("task.view", config.task.view, f"must be odd; {config.task.view + 1} works")
    _check_hardware(config)
    _check_model(config)
    _check_training(config)


def observation_tokens(config: Config) -> int:
    """Tokens of one observation: rows of cells with a newline each, and a prompt mark."""
    side = config.task.view or config.task.size
    return side * (side + 1) + 1


def _check_context(config: Config) -> None:
    need = observation_tokens(config) + config.task.actions_per_turn
    have = config.generation.max_model_len
    if need > have:
        reason = f"one turn of this task needs {need} tokens; set it to at least {need}"
        raise ConfigError("generation.max_model_len", have, reason)


def _check_hardware(config: Config) -> None:
    generation = config.generation
    if len(generation.hardware) not in (1, generation.workers):
        reason = f"give one class for all, or one for each of the {generation.workers} workers"
        raise ConfigError("generation.hardware", generation.hardware, reason)
    classes = {pool.hardware for pool in config.pools}
    named = [("generation.hardware", name) for name in generation.hardware]
    named += [(f"generation.affinity.{task}", name) for task, name in generation.affinity.items()]
    for key, hardware in named:
        if hardware not in classes:
            reason = f"no pool has this hardware class; pools offer {', '.join(sorted(classes))}"
            raise ConfigError(key, hardware, reason)
    # A unit for each engine, the trainer, the environments and the rewards.
    needed, offered = generation.workers + 3, sum(pool.total for pool in config.pools)
    if offered < needed:
        raise ConfigError("pools", offered, f"the pools hold {offered:g} units in all, the roles ask for {needed}")
    if "default" not in generation.affinity:
        raise ConfigError("generation.affinity", generation.affinity, "needs an entry named default")


def _check_finite(section: msgspec.Struct, prefix: str = "") -> None:
    for name in section.__struct_fields__:
        value = getattr(section, name)
        if isinstance(value, msgspec.Struct):
            _check_finite(value, f"{prefix}{name}.")
        elif isinstance(value, tuple) and any(isinstance(item, msgspec.Struct) for item in value):
            for index, item in enumerate(value):
                _check_finite(item, f"{prefix}{name}.{index}.")
        elif isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{prefix}{name}", value, "must be a finite number")


def _check_model(config: Config) -> None:
    if not config.model.path:
        return
    folder = Path(config.model.path)
    for pattern, what in (("config.json", "a model"), ("tokenizer*", "a tokenizer"), ("*.safetensors", "weights")):
        if not any(folder.glob(pattern)):
            raise ConfigError(
                "model.path", config.model.path, f"holds no {pattern}: name a Hugging Face folder with {what}"
            )


def _check_training(config: Config) -> None:
    if config.buffer.group_size < 2 and config.buffer.drop_uniform:
        reason = "the rewards of a group of one are always equal; use 2 or more, or buffer.drop_uniform=false"
        raise ConfigError("buffer.group_size", config.buffer.group_size, reason)
    if config.run.mode == "sync" and config.buffer.alpha > 0:
        reason = "mode sync is on-policy: set buffer.alpha to 0, or run.mode to rollart"
        raise ConfigError("buffer.alpha", config.buffer.alpha, reason)


# What a checkpoint's contents depend on: these keys cannot change between a run and its continuation.
_FIXED = (
    "run.seed",
    "run.mode",
    "task.name",
    "task.size",
    "task.frozen",
    "task.view",
    "task.actions_per_turn",
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


def check_resumable(config: Config, stored: Config) -> None:
    """Raise ConfigError when `config` cannot continue a run that was started with `stored`."""
    changed = [key for key in differing(config, stored) if key in _FIXED]
    if changed:
        now, then = (attrgetter(changed[0])(c) for c in (config, stored))
        raise ConfigError(changed[0], now, f"the run was started with {then!r}; keep that, or use --overwrite")


def differing(one: msgspec.Struct, other: msgspec.Struct, prefix: str = "") -> list[str]:
    """The dotted keys in which two configurations differ."""
    keys: list[str] = []
    for name in one.__struct_fields__:
        ours, theirs = getattr(one, name), getattr(other, name)
        if isinstance(ours, msgspec.Struct):
            keys += differing(ours, theirs, f"{prefix}{name}.")
        elif ours != theirs:
            keys.append(prefix + name)
    return keys
