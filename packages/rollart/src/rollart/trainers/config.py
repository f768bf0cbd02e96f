"""The settings of a trainer and its learning-rate schedule. What they promise together is checked in `layout.py`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from rollart.algorithms import AdvantageName, ObjectiveConfig

Positive = Annotated[float, Meta(gt=0, le=1e9)]
NonNegative = Annotated[float, Meta(ge=0, le=1e9)]
Share = Annotated[float, Meta(ge=0, le=1)]
Momentum = Annotated[float, Meta(ge=0, lt=1)]
Count = Annotated[int, Meta(ge=1, lt=2**31)]


class TrainerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Optimizer, schedule and cut of a train step. Ranges stand in the types, for configurations to be checked."""

    backend: Literal["torch", "megatron"] = "torch"
    """`torch` shards with FSDP2 over `data_parallel` processes, `megatron` takes all three degrees."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the trainer computes; engines take `generation.gpus`."""
    gpus: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """On cuda: what each process takes of a GPU; a fraction leaves the rest to engines, see `generation.gpus`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the model computes in, and the type of published weights; the optimizer's are float32 always."""
    data_parallel: Count = 1
    """Copies of the model, or with torch the processes over which it is sharded."""
    tensor_parallel: Count = 1
    """megatron: processes that share each layer."""
    pipeline_parallel: Count = 1
    """megatron: stages of layers, a process each."""
    distributed_optimizer: bool = True
    """megatron: optimizer states are sharded over the data-parallel ranks. FSDP2 does so always."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """docs/losses.md has the formulas."""
    advantage: AdvantageName = "group_normalized"
    """Or `leave_one_out`, `reinforce`."""
    lr: Positive = 1e-3
    """The highest learning rate, after the warm-up."""
    warmup: Annotated[int, Meta(ge=0, lt=2**31)] = 5
    """Train steps of linear warm-up."""
    total: Count | None = None
    """Train steps after which the learning rate has come down to `final_lr` times `lr`; None is `run.iterations`,
    those of the continuation where a run goes on with more. A trainer without a run keeps its rate then."""
    final_lr: Share = 0.1
    """A share of `lr`; it stays there afterwards."""
    beta1: Momentum = 0.9
    """AdamW's, as the next three."""
    beta2: Momentum = 0.99
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.0
    grad_clip: Positive = 1.0
    """Longest gradient of an update, by its norm."""
    ppo_epochs: Count = 1
    """Passes of a train step over its batch."""
    minibatches: Count = 4
    """Optimizer updates per pass, each on its own share of the batch."""
    minibatch_of: Literal["trajectories", "groups"] = "trajectories"
    """What a minibatch never cuts."""
    micro_tokens: Count = 32_768
    """Padded tokens that go through the model at once: gradients of as many micro-batches as it takes add up."""
    logits_mb: Count = 64
    """MiB of float32 logits that exist at once; more tokens than fit are computed piece by piece, twice."""
    checkpoint_activations: bool = False
    """Keep each layer's input alone, and compute the layer again for its gradient."""
    temperature: Positive = 1.0
    """Of the trainer's probabilities. Tasks are sampled at 1, so leave it there unless yours differ."""
    seed: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    """Of the shuffle into minibatches; None is `run.seed`, which is that of everything else."""

    @property
    def processes(self) -> int:
        """Trainer processes, one a device."""
        return self.data_parallel * self.tensor_parallel * self.pipeline_parallel

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then linear decay to `final_lr`, of train step `step` (from 0)."""
        warm = min(1.0, (step + 1) / max(1, self.warmup))
        done = min(1.0, step / self.total) if self.total else 0.0
        return self.lr * warm * (1 - (1 - self.final_lr) * done)
