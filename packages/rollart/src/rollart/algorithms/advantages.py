"""Advantages: how much better a trajectory, or a token, was than expected.

The first three work on one reward per trajectory and a group index per trajectory; `gae` works on
[batch, tokens]. All are pure functions of torch tensors. Each is checked against an independent float64 reference,
and against groups of any size (``tests/rollart/test_rollart_advantages.py``).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

AdvantageName = Literal["group_normalized", "leave_one_out", "reinforce"]


def _group_means(values: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """Every entry's group mean and group size. Raises ValueError unless there is a group for each value."""
    if values.dim() != 1 or group.shape != values.shape:
        shapes = f"rewards have shape {tuple(values.shape)}, group {tuple(group.shape)}"
        raise ValueError(f"{shapes}; give one of each for every trajectory")
    _, index = torch.unique(group, return_inverse=True)
    groups = int(index.max()) + 1 if index.numel() else 0
    sizes = torch.zeros(groups, dtype=values.dtype).index_add_(0, index, torch.ones_like(values))
    sums = torch.zeros(groups, dtype=values.dtype).index_add_(0, index, values)
    return (sums / sizes)[index], sizes[index]


def group_normalized(rewards: Tensor, group: Tensor, *, scale: bool = True, epsilon: float = 1e-6) -> Tensor:
    """A_i = (R_i - mean(R_group)) / (std(R_group) + epsilon), with the population's standard deviation.

    Source: GRPO (DeepSeekMath, arXiv 2402.03300), section 4.1.2. Without `scale` the division is left out
    (Dr. GRPO, arXiv 2503.20783). A group of equal rewards gives zeros, but for rounding.
    """
    mean, _ = _group_means(rewards, group)
    centered = rewards - mean
    if not scale:
        return centered
    variance, _ = _group_means(centered.square(), group)
    return centered / (variance.sqrt() + epsilon)


def leave_one_out(rewards: Tensor, group: Tensor) -> Tensor:
    """A_i = R_i - mean of the *other* rewards of its group; zero where there is no other.

    Source: RLOO (arXiv 2402.14740), equation 7.
    """
    mean, size = _group_means(rewards, group)
    others = (size - 1).clamp(min=1)
    return (rewards - mean) * size / others


def reinforce(rewards: Tensor, group: Tensor, *, baseline: bool = True) -> Tensor:
    """A_i = R_i - mean(R over the batch); the raw reward without `baseline`. Groups play no part.

    Source: Williams 1992, REINFORCE with a constant baseline.
    """
    del group
    return rewards - rewards.mean() if baseline else rewards.clone()


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation over the unmasked tokens of each row; returns (advantages, returns).

    delta_t = r_t + gamma V_{t+1} - V_t,  A_t = delta_t + gamma lam A_{t+1},  returns = A + V, where t + 1 means the
    row's *next unmasked token* (a tool's or environment's tokens in between are no decisions) and V is 0 after the
    last. Masked tokens get zero. Source: arXiv 1506.02438, equations 11 to 16.
    """
    if values.dim() != 2 or not rewards.shape == values.shape == mask.shape:
        shapes = f"rewards {tuple(rewards.shape)}, values {tuple(values.shape)}, mask {tuple(mask.shape)}"
        raise ValueError(f"{shapes} must all be [batch, tokens]")
    advantages = torch.zeros_like(values)
    ahead = values.new_zeros(len(values))
    next_value = torch.zeros_like(ahead)
    for t in range(values.shape[1] - 1, -1, -1):
        here = mask[:, t].bool()
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        ahead = torch.where(here, delta + gamma * lam * ahead, ahead)
        next_value = torch.where(here, values[:, t], next_value)
        advantages[:, t] = torch.where(here, ahead, 0.0)
    return advantages, torch.where(mask.bool(), advantages + values, 0.0)


def trajectory_advantages(name: AdvantageName, rewards: Tensor, group: Tensor) -> Tensor:
    """The advantage of each trajectory by the named estimator."""
    if name == "group_normalized":
        return group_normalized(rewards, group)
    if name == "leave_one_out":
        return leave_one_out(rewards, group)
    return reinforce(rewards, group)
