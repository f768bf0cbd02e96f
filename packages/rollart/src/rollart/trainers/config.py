"""The settings of a trainer and its learning-rate schedule."""

from __future__ import annotations

import msgspec

from rollart.algorithms import ObjectiveConfig


class TrainerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Optimizer, schedule and cut of a train step."""

    objective: ObjectiveConfig = ObjectiveConfig()
    lr: float = 1e-3
    warmup: int = 5
    """Train steps of linear warm-up."""
    total: int = 80
    """Train steps after which the learning rate has come down to `final_lr` times `lr`."""
    final_lr: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    minibatches: int = 4
    """Optimizer updates per train step, each on its own share of the trajectories."""
    micro_tokens: int = 32_768
    """Padded tokens that go through the model at once."""
    temperature: float = 1.0
    seed: int = 0

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then linear decay to `final_lr`, of train step `step` (from 0)."""
        warm = min(1.0, (step + 1) / max(1, self.warmup))
        done = min(1.0, step / max(1, self.total))
        return self.lr * warm * (1 - (1 - self.final_lr) * done)
