"""The resolved plan of a configuration, before anything starts: resources, processes, memory, batch shapes.

Memory is what the FrozenLake example was measured to take on a CPU; the model's share is computed. Held by
tests/rollart/test_rollart_plan.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, floor
from pathlib import Path

from rollart.config import Config
from rollart.config.check import least_context, vocabulary
from rollart.config.tasks import AnyTask, EnvConfig, FrozenLakeConfig
from rollart.models.tiny import TinyQwen3
from rollart.models.vocabulary import VOCABULARIES

MIB = 1 << 20
# Resident MiB of each process without the model (the CPU example, measured by summing the process tree by name).
_DRIVER_MIB = 700
_ENGINE_MIB = 1_450
_TRAINER_MIB = 650
_RAY_MIB = 450
_STORES_MIB = 120


def plan(config: Config) -> str:
    """The plan as text, one line a fact."""
    sections = (
        ("run", _run(config)),
        ("resources", _resources(config)),
        ("processes", _processes(config)),
        ("batch", _batch(config)),
        ("weights", _weights(config)),
    )
    lines = []
    for title, facts in sections:
        lines.append(title)
        lines += [f"  {name:<12} {text}" for name, text in facts]
    return "\n".join(lines)


def _run(config: Config) -> Iterator[tuple[str, str]]:
    run = config.run
    yield "name", f"{run.name} (in {Path(run.folder) / run.name})"
    yield "mode", f"{run.mode}, {run.iterations} iterations, seed {run.seed}"
    for name, task in config.tasks.items():
        share = task.weight / sum(other.weight for other in config.tasks.values())
        yield "task", f"{name}: {_what(task)}, up to {task.max_turns} turns, {share:.0%} of the groups"
        context = config.generation.max_model_len
        whole = task.max_turns if task.latest_only else context // least_context(task)
        if whole < task.max_turns:
            room = f"room for {whole} turns that use all their tokens; an episode whose context is full ends"
            yield "context", f"{name}: {context} tokens, {room}"
    yield (
        "evaluation",
        f"{config.eval.episodes} held-out episodes before training and every {config.eval.every} iterations",
    )


def requests(config: Config) -> dict[str, tuple[list[str], float]]:
    """What each role asks of the resource manager: hardware classes in order of preference, and an amount."""
    classes = list(dict.fromkeys(pool.hardware for pool in config.pools))
    hardware = config.generation.hardware
    workers = config.generation.workers
    each = hardware if len(hardware) == workers else hardware * workers

    def first(preferred: str) -> list[str]:
        return [preferred, *(name for name in classes if name != preferred)]

    asked = {f"gen-{i}": (first(name), 1.0) for i, name in enumerate(each)}
    ranks = [f"train-{rank}" for rank in range(config.train.processes)]
    return asked | dict.fromkeys((*ranks, "environment", "reward"), (classes, 1.0))


def _resources(config: Config) -> Iterator[tuple[str, str]]:
    for pool in config.pools:
        yield "pool", f"{pool.name}: {pool.total:g} of {pool.hardware}"
    for role, (classes, amount) in requests(config).items():
        yield "binding", f"{role}: {amount:g} of {', else '.join(classes)}"


def _processes(config: Config) -> Iterator[tuple[str, str]]:
    engine = _ENGINE_MIB + config.generation.kv_cache_mb + _model_mib(config)
    trainer = _TRAINER_MIB + 5 * _model_mib(config)
    ranks = config.train.processes
    total = _DRIVER_MIB + _RAY_MIB + _STORES_MIB + ranks * trainer + config.generation.workers * engine
    yield "driver", f"1, with {config.rollout.concurrency} environments at once (about {_DRIVER_MIB} MiB)"
    yield "engines", f"{config.generation.workers} vLLM (about {engine} MiB each)"
    yield "trainer", f"{ranks} {config.train.backend} (about {trainer} MiB each)"
    yield "services", f"Ray, metadata store, weight store (about {_RAY_MIB + _STORES_MIB} MiB)"
    yield "memory", f"about {total / 1024:.1f} GiB in all"


def _batch(config: Config) -> Iterator[tuple[str, str]]:
    buffer = config.buffer
    trajectories = buffer.batch_groups * buffer.group_size
    alive = floor((1 + buffer.alpha) * buffer.batch_groups) + buffer.spare_groups
    yield "batch", f"{buffer.batch_groups} groups of {buffer.group_size} = {trajectories} trajectories"
    yield "arrays", f"up to {_rows(config)} rows of {_width(config)} tokens"
    yield "updates", f"{config.train.minibatches} a train step, loss {config.train.objective.loss}"
    rate = config.trainer
    yield "rate", f"{rate.lr:g}, down to {rate.final_lr * rate.lr:g} after {rate.total} train steps"
    yield "bound", f"alpha {buffer.alpha:g}: staleness at most {ceil(buffer.alpha)}, at most {alive} groups alive"
    if buffer.spare_groups or buffer.spare_members:
        yield "redundancy", f"{buffer.spare_groups} spare groups, {buffer.spare_members} spare members each"


def _what(task: AnyTask) -> str:
    if isinstance(task, FrozenLakeConfig):
        return f"FrozenLake {task.size}x{task.size}"
    return task.env if isinstance(task, EnvConfig) else task.kind


def _rows(config: Config) -> int:
    """Context segments of a batch, at most: each turn is one where a turn shows the whole state."""
    segments = max(task.max_turns if task.latest_only else 1 for task in config.tasks.values())
    return config.buffer.batch_groups * config.buffer.group_size * segments


def _width(config: Config) -> int:
    """Tokens of a row, at most."""
    lakes = all(isinstance(task, FrozenLakeConfig) for task in config.tasks.values())
    return max(map(least_context, config.tasks.values())) if lakes else config.generation.max_model_len


def _weights(config: Config) -> Iterator[tuple[str, str]]:
    size = _model_bytes(config)
    buckets = max(1, ceil(size / (config.weights.bucket_mb * MIB)))
    yield "model", f"{size / MIB:.2f} MiB of fp32 weights in {buckets} bucket(s) of {config.weights.bucket_mb:g} MiB"
    yield "store", f"{config.weights.store}, {config.weights.keep_versions} versions kept"


def _model_mib(config: Config) -> int:
    return ceil(_model_bytes(config) / MIB)


def _model_bytes(config: Config) -> int:
    if config.model.path:
        return sum(file.stat().st_size for file in Path(config.model.path).glob("*.safetensors"))
    return 4 * tiny_parameters(config)


def tiny_parameters(config: Config) -> int:
    """Parameters of the tiny Qwen3 that the configuration describes."""
    shape = TinyQwen3(seed=0, hidden=config.model.hidden, layers=config.model.layers, heads=config.model.heads)
    attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads) + 2 * shape.head_dim
    layer = attention + 3 * shape.hidden * shape.intermediate + 2 * shape.hidden
    return shape.layers * layer + shape.hidden + 2 * len(VOCABULARIES[vocabulary(config)]) * shape.hidden
