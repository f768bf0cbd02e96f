"""The typed configuration of a run: one frozen Struct per section, defaults that run on a laptop.

Ranges stand in the types, so that loading checks them; `check.py` holds what several fields promise together.
The resolved configuration is written beside the results. Held by tests/rollart/test_rollart_config.py.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from rollart.config.tasks import AnyTask, Count, FrozenLakeConfig, Positive
from rollart.trainers.config import TrainerConfig

Mode = Literal["rollart", "areal", "one_off", "sync_plus", "sync"]
Store = Literal["auto", "mooncake", "shm"]

CountOrZero = Annotated[int, Meta(ge=0, lt=2**31)]
Many = Annotated[int, Meta(ge=1, le=100_000)]
"""Of what is made one by one, such as environments and episodes."""
Share = Annotated[float, Meta(ge=0, le=1)]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the sections: immutable, keyword-only, strict about unknown keys."""


class RunConfig(Section, frozen=True):
    """What the run is called and how long it goes on."""

    name: Name = "run"
    folder: str = "runs"
    seed: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    mode: Mode = "rollart"
    iterations: Count = 80
    stop_at_success: Share | None = None
    """End early when an evaluation's success rate reaches this value; None trains all iterations."""
    wandb: str = ""
    """Weights & Biases project to log to, beside metrics.jsonl and TensorBoard; offline without an API key."""


class ModelConfig(Section, frozen=True):
    """A Hugging Face folder, or (empty path) a tiny Qwen3 made on the spot."""

    path: str = ""
    hidden: Annotated[int, Meta(ge=1, le=16_384)] = 64
    layers: Annotated[int, Meta(ge=1, le=1_000)] = 2
    heads: Annotated[int, Meta(ge=1, le=1_000)] = 4


class GenerationConfig(Section, frozen=True):
    """The vLLM engines. `hardware` names the class of each worker; affinity maps tasks to classes."""

    workers: Many = 2
    hardware: tuple[str, ...] = ("cpu",)
    affinity: dict[str, str] = msgspec.field(default_factory=lambda: {"default": "cpu"})
    max_model_len: Count = 128
    max_num_seqs: Many = 128
    kv_cache_mb: Count = 64
    gpus: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    """GPUs of each engine: 0 for the CPU, a whole number for as many tensor-parallel ranks, a fraction to share one.
    Engines compute in `train.dtype`, the type in which weights are published."""
    start_timeout_s: Positive = 300.0
    proxies: Many = 1
    """LLM proxies over the same engines, each serving a share of the trajectories; updates reach all of them."""
    restarts: CountOrZero = 3
    """How often each engine is started anew after its process died; rollout goes on with the others meanwhile."""


class RolloutConfig(Section, frozen=True):
    """The environment managers and their deadlines (seconds)."""

    concurrency: Many = 192
    step_timeout_s: Positive = 30.0
    turn_timeout_s: Positive = 120.0
    episode_timeout_s: Positive = 600.0


class BufferConfig(Section, frozen=True):
    """Groups, redundancy and the staleness bound. `drop_uniform` drops groups whose rewards are all equal."""

    batch_groups: Many = 16
    group_size: Many = 8
    alpha: Annotated[float, Meta(ge=0, le=1000)] = 1.0
    spare_groups: Annotated[int, Meta(ge=0, le=100_000)] = 0
    spare_members: Annotated[int, Meta(ge=0, le=100_000)] = 0
    drop_uniform: bool = True


class WeightsConfig(Section, frozen=True):
    """The weight path. `auto` is Mooncake over TCP, or shared memory where its system library is missing."""

    store: Store = "auto"
    bucket_mb: Annotated[float, Meta(ge=0.001, le=1e9)] = 1.0
    keep_versions: Count = 3
    segment_mb: Count = 128
    timeout_s: Positive = 60.0
    parity_limit: Positive | None = 1e-3
    """Largest difference of log-probabilities between engine and trainer, in nats, before the run stops."""


class PoolConfig(Section, frozen=True):
    """A resource pool as the resource manager sees it."""

    name: str
    hardware: str
    total: Positive


class EvalConfig(Section, frozen=True):
    """Evaluation on held-out task instances, before training and every few iterations."""

    every: Count = 10
    episodes: Many = 256


class CheckpointConfig(Section, frozen=True):
    every: Count = 10
    keep: Count = 2


class Config(Section, frozen=True):
    """The whole configuration of a run."""

    run: RunConfig = RunConfig()
    tasks: dict[Name, AnyTask] = msgspec.field(default_factory=lambda: {"FrozenLake": FrozenLakeConfig()})
    model: ModelConfig = ModelConfig()
    generation: GenerationConfig = GenerationConfig()
    rollout: RolloutConfig = RolloutConfig()
    buffer: BufferConfig = BufferConfig()
    train: TrainerConfig = TrainerConfig()
    weights: WeightsConfig = WeightsConfig()
    pools: tuple[PoolConfig, ...] = (PoolConfig(name="local", hardware="cpu", total=512),)
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
