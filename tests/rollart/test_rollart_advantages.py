"""Advantages against independent float64 references in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollart.algorithms import gae, group_normalized, leave_one_out, reinforce, trajectory_advantages

members = st.lists(st.tuples(st.integers(0, 4), st.floats(-5, 5)), min_size=1, max_size=30)


def arrays(pairs: list[tuple[int, float]]) -> tuple[torch.Tensor, torch.Tensor]:
    group, rewards = zip(*pairs, strict=True)
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(group)


@given(members)
def test_group_estimators_equal_the_reference(pairs: list[tuple[int, float]]) -> None:
    rewards, group = arrays(pairs)
    normalized, alone = group_normalized(rewards, group), leave_one_out(rewards, group)
    centered = group_normalized(rewards, group, scale=False)
    for i, (own, reward) in enumerate(pairs):
        fellows = np.array([r for g, r in pairs if g == own])
        others = np.array([r for j, (g, r) in enumerate(pairs) if g == own and j != i])
        assert float(centered[i]) == pytest.approx(reward - fellows.mean(), abs=1e-6)
        scale = np.sqrt(np.mean((fellows - fellows.mean()) ** 2)) + 1e-6
        assert float(normalized[i]) == pytest.approx((reward - fellows.mean()) / scale, abs=1e-6, rel=1e-6)
        expected = reward - others.mean() if len(others) else 0.0
        assert float(alone[i]) == pytest.approx(expected, abs=1e-6)


@given(st.floats(-3, 3), st.integers(1, 9))
def test_equal_rewards_teach_nothing(reward: float, size: int) -> None:
    rewards, group = torch.full((size,), reward, dtype=torch.float64), torch.zeros(size, dtype=torch.long)
    for name in ("group_normalized", "leave_one_out", "reinforce"):
        assert trajectory_advantages(name, rewards, group).abs().max() < 1e-9


@given(members)
def test_reinforce_subtracts_the_batch_mean(pairs: list[tuple[int, float]]) -> None:
    rewards, group = arrays(pairs)
    np.testing.assert_allclose(reinforce(rewards, group), rewards.numpy() - np.mean(rewards.numpy()), atol=1e-9)
    np.testing.assert_array_equal(reinforce(rewards, group, baseline=False), rewards)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.95), (1.0, 0.0)])
@pytest.mark.parametrize("seed", range(4))
def test_gae_equals_the_reference(gamma: float, lam: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = (5, 8)
    rewards, values = rng.normal(size=shape), rng.normal(size=shape)
    mask = rng.random(shape) < 0.6
    advantages, returns = gae(*map(torch.from_numpy, (rewards, values, mask)), gamma=gamma, lam=lam)
    for row in range(shape[0]):
        steps = np.flatnonzero(mask[row])
        r, v = rewards[row, steps], np.append(values[row, steps], 0.0)
        delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(len(steps))]
        for t, column in enumerate(steps):
            expected = sum((gamma * lam) ** k * delta[t + k] for k in range(len(steps) - t))
            assert float(advantages[row, column]) == pytest.approx(expected, abs=1e-6)
            assert float(returns[row, column]) == pytest.approx(expected + v[t], abs=1e-6)
    assert not bool(advantages[~torch.from_numpy(mask)].any())
    assert not bool(returns[~torch.from_numpy(mask)].any())


def test_gae_with_lambda_one_is_return_minus_value() -> None:
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.2, 0.4, 0.9]])
    advantages, _ = gae(rewards, values, torch.ones(1, 3, dtype=torch.bool), gamma=1.0, lam=1.0)
    np.testing.assert_allclose(advantages, 1.0 - values, atol=1e-6)


def test_lengths_that_do_not_fit_are_refused_and_nothing_is_nothing() -> None:
    for estimate in (group_normalized, leave_one_out):
        with pytest.raises(ValueError, match=r"rewards have shape \(3,\), group \(2,\)"):
            estimate(torch.zeros(3), torch.zeros(2))
        assert estimate(torch.zeros(0), torch.zeros(0)).shape == (0,)
    with pytest.raises(ValueError, match=r"must all be \[batch, tokens\]"):
        gae(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 1))
    assert gae(torch.zeros(2, 0), torch.zeros(2, 0), torch.zeros(2, 0))[0].shape == (2, 0)
