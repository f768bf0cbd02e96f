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
    """Its results are in `folder`/`name`."""
    folder: Annotated[str, Meta(pattern=r"^[^\x00]*$")] = "runs"
    """Where runs lie."""
    seed: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    """Of the task instances and their order, the engines' draws, a tiny model's weights."""
    mode: Mode = "rollart"
    """`rollart` is the pipeline of six steps; `areal`, `one_off`, `sync_plus`, `sync` are for comparison."""
    iterations: Count = 80
    """Batches, and so train steps. The learning rate comes down over them, unless `train.total` says otherwise."""
    stop_at_success: Share | None = None
    """End early when an evaluation's success rate reaches this value; None trains all iterations."""
    wandb: str = ""
    """Weights & Biases project to log to, beside metrics.jsonl and TensorBoard; offline without WANDB_API_KEY in the
    environment."""


class ModelConfig(Section, frozen=True):
    """A Hugging Face folder, or a tiny Qwen3 made on the spot."""

    path: str = ""
    """The folder; empty for the tiny model, of which the other keys are."""
    hidden: Annotated[int, Meta(ge=1, le=16_384)] = 64
    layers: Annotated[int, Meta(ge=1, le=1_000)] = 2
    heads: Annotated[int, Meta(ge=1, le=1_000)] = 4


class GenerationConfig(Section, frozen=True):
    """The vLLM engines. `hardware` names the class of each worker; affinity maps tasks to classes."""

    workers: Many = 2
    """Engines."""
    hardware: tuple[str, ...] = ("cpu",)
    """One class for all engines, or one for each."""
    affinity: dict[str, str] = msgspec.field(default_factory=lambda: {"default": "cpu"})
    """The class on which each task is generated; `default` is that of the others."""
    max_model_len: Count = 128
    """Tokens of a context, prompt and answers together; an episode whose context is full ends."""
    max_num_seqs: Many = 128
    """Sequences that an engine generates at once."""
    kv_cache_mb: Count = 64
    """MiB of an engine's key-value cache."""
    gpus: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    """GPUs of each engine: 0 for the CPU, a whole number for as many tensor-parallel ranks, a fraction to share one.
    Engines compute in `train.dtype`, the type in which weights are published."""
    start_timeout_s: Positive = 300.0
    """For an engine to be ready, imports included."""
    proxies: Many = 1
    """LLM proxies over the same engines, each serving a share of the trajectories; updates reach all of them."""
    restarts: CountOrZero = 3
    """How often each engine is started anew after its process died; rollout goes on with the others meanwhile."""


class RolloutConfig(Section, frozen=True):
    """The environment managers and their deadlines (seconds)."""

    concurrency: Many = 192
    """Environments at once."""
    step_timeout_s: Positive = 30.0
    """One step of an environment; a task may have its own."""
    turn_timeout_s: Positive = 120.0
    """Generating and stepping."""
    episode_timeout_s: Positive = 600.0
    """A whole episode but its reward; a task may have its own."""
    reward_timeout_s: Positive = 600.0
    """The reward of one episode; what takes longer failed, and the episode is played anew."""


class BufferConfig(Section, frozen=True):
    """Groups, redundancy and the staleness bound."""

    batch_groups: Many = 16
    """Groups of a batch."""
    group_size: Many = 8
    """Trajectories of a group, all of one task instance."""
    alpha: Annotated[float, Meta(ge=0, le=1000)] = 1.0
    """Weight updates that a trajectory may live through; beyond ceil(alpha) it is ended and its place filled anew."""
    spare_groups: Annotated[int, Meta(ge=0, le=100_000)] = 0
    """Groups played beyond those that the bound allows; the first to be whole win."""
    spare_members: Annotated[int, Meta(ge=0, le=100_000)] = 0
    """Trajectories of each group played beyond `group_size`; the first to finish win, the others are cancelled."""
    drop_uniform: bool = True
    """Groups whose rewards are all equal teach nothing: they are dropped, and replaced. Set it to false for a model
    whose groups all end alike, such as a tiny one that never succeeds: else no batch is ever full."""
    patience: Annotated[float, Meta(ge=0, le=1000)] = 1.0
    """How long a batch waits for groups that the next version would end: until the wait has cost this many times what
    throwing them away would. 0 never waits. Modes that hold or do not evict have nothing to wait for."""


class WeightsConfig(Section, frozen=True):
    """The weight path. `auto` is Mooncake over TCP, or shared memory where its system library is missing."""

    store: Store = "auto"
    """Or `mooncake`, or `shm`: shared memory of this machine."""
    bucket_mb: Annotated[float, Meta(ge=0.001, le=1e9)] = 1.0
    """MiB of a bucket, the unit in which weights travel."""
    keep_versions: Count = 3
    """Versions that the store holds."""
    segment_mb: Count = 128
    """MiB of the store."""
    timeout_s: Positive = 60.0
    """For one transfer."""
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
    """Iterations."""
    episodes: Many = 256
    """Held-out episodes of each evaluation, shared out among the tasks."""


class CheckpointConfig(Section, frozen=True):
    """What `rollart resume` goes on from: weights, optimizer, sample buffer, ledger."""

    every: Count = 10
    """Iterations."""
    keep: Count = 2
    """Checkpoints that stay; older ones are removed."""


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
    """What the resource manager hands out: `total` units (GPUs, or processes where they use a CPU) of a class
    `hardware`. Each engine, each trainer process, the environments and the rewards take one."""
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @property
    def trainer(self) -> TrainerConfig:
        """`train`, with the run's iterations and seed where it has none of its own."""
        seed = self.run.seed if self.train.seed is None else self.train.seed
        return msgspec.structs.replace(self.train, total=self.train.total or self.run.iterations, seed=seed)
