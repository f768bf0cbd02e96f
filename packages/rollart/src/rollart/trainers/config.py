"""The settings of a trainer and its learning-rate schedule."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from rollart.algorithms import ObjectiveConfig

Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Momentum = Annotated[float, Meta(ge=0, lt=1)]
Count = Annotated[int, Meta(ge=1)]


class TrainerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Optimizer, schedule and cut of a train step. Ranges stand in the types, for configurations to be checked."""

    objective: ObjectiveConfig = ObjectiveConfig()
    lr: Positive = 1e-3
    warmup: Annotated[int, Meta(ge=0)] = 5
    """Train steps of linear warm-up."""
    total: Count = 80
    """Train steps after which the learning rate has come down to `final_lr` times `lr`."""
    final_lr: Share = 0.1
    beta1: Momentum = 0.9
    beta2: Momentum = 0.99
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.0
    grad_clip: Positive = 1.0
    minibatches: Count = 4
    """Optimizer updates per train step, each on its own share of the trajectories."""
    micro_tokens: Count = 32_768
    """Padded tokens that go through the model at once."""
    temperature: Positive = 1.0
    seed: int = 0

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then linear decay to `final_lr`, of train step `step` (from 0)."""
        warm = min(1.0, (step + 1) / max(1, self.warmup))
        done = min(1.0, step / max(1, self.total))
        return self.lr * warm * (1 - (1 - self.final_lr) * done)
