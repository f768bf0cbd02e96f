"""Tokens of several versions in one batch, on a bandit where the true gradient and the optimum are known.

Every token is weighted by the log-probability that *its own* version gave it. The bandit shows that this is right and
that the tempting short cuts (the newest version's for all, or no weight at all) are not.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollart.algorithms import ObjectiveConfig, Tokens, aggregation_weights, objective

pytestmark = pytest.mark.seconds

REWARDS = torch.tensor([0.0, 1.0, 0.6, 0.2], dtype=torch.float64)
# Three versions of the policy; the newest is last. A batch holds tokens of all of them.
VERSIONS = torch.log_softmax(
    torch.tensor([[2.0, -1.5, 0.5, 0.0], [0.5, -0.2, 0.8, 0.1], [-0.5, 0.1, 0.9, 0.2]], dtype=torch.float64), -1
)
SHARES = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
WIDE = 1e6  # a bound that touches nothing

UNBOUNDED = [
    ObjectiveConfig(loss="ppo", clip_low=1.0, clip_high=WIDE),
    ObjectiveConfig(loss="decoupled_ppo", clip_low=1.0, clip_high=WIDE, cap=WIDE),
    ObjectiveConfig(loss="tis", cap=WIDE),
    ObjectiveConfig(loss="tis", cap=WIDE, mismatch_cap=WIDE),
    ObjectiveConfig(loss="cispo", clip_low=1.0, clip_high=WIDE),
]


def gradient(config: ObjectiveConfig, logits: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
    """The expected gradient: every (version, arm) weighted by how often it is drawn, no sampling noise."""
    variable = logits.clone().requires_grad_(True)
    logprobs = torch.log_softmax(variable, -1).expand(len(SHARES), -1)
    drawn = SHARES[:, None] * VERSIONS.exp()
    baseline = float((logprobs.detach()[0].exp() * REWARDS).sum())
    tokens = Tokens(
        mask=torch.ones_like(drawn, dtype=torch.bool),
        behaviour=behaviour,
        advantages=(REWARDS - baseline).expand_as(drawn),
        proximal=VERSIONS[-1].expand_as(drawn),
    )
    total, _ = objective(config, logprobs, torch.zeros_like(drawn), tokens, drawn)
    total.backward()
    assert variable.grad is not None
    return -variable.grad


def true_gradient(logits: torch.Tensor) -> torch.Tensor:
    """d/d logits of sum_a pi(a) R(a)."""
    variable = logits.clone().requires_grad_(True)
    (torch.softmax(variable, -1) * REWARDS).sum().backward()
    assert variable.grad is not None
    return variable.grad


@pytest.mark.parametrize("config", UNBOUNDED, ids=lambda c: f"{c.loss}-{c.mismatch_cap}")
def test_own_versions_give_the_true_gradient(config: ObjectiveConfig) -> None:
    logits = torch.tensor([0.3, 0.0, 0.7, -0.4], dtype=torch.float64)
    truth = true_gradient(logits)
    torch.testing.assert_close(gradient(config, logits, VERSIONS), truth, atol=1e-6, rtol=1e-6)
    newest = gradient(config, logits, VERSIONS[-1].expand_as(VERSIONS))
    own = torch.log_softmax(logits, -1).expand_as(VERSIONS)
    for wrong in (newest, gradient(config, logits, own)):
        assert float((wrong - truth).abs().max()) > 0.02


@pytest.mark.parametrize(
    "config",
    [
        ObjectiveConfig(loss="ppo"),
        ObjectiveConfig(loss="decoupled_ppo"),
        ObjectiveConfig(loss="tis"),
        ObjectiveConfig(loss="topr"),
        ObjectiveConfig(loss="weighted_topr", negative_weight=0.5),
    ],
    ids=lambda c: c.loss,
)
def test_bounds_keep_the_direction(config: ObjectiveConfig) -> None:
    """With their usual bounds the losses are biased on purpose, and still climb."""
    logits = VERSIONS[-1].clone()
    assert float(gradient(config, logits, VERSIONS) @ true_gradient(logits)) > 0


def learn(behaviour_of: str) -> np.ndarray:
    """Trains on sampled batches of mixed versions, with an entropy bonus; returns the policy it ends with."""
    rng = np.random.default_rng(0)
    config = ObjectiveConfig(loss="tis", cap=WIDE, entropy_coef=0.5)
    logits = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([logits], lr=0.5)
    mean = np.zeros(4)
    for step in range(400):
        version = rng.choice(3, size=512, p=SHARES.numpy())
        arm = (rng.random(512)[:, None] > VERSIONS.exp().numpy().cumsum(-1)[version]).sum(-1).clip(max=3)
        own = VERSIONS[torch.from_numpy(version), torch.from_numpy(arm)]
        newest = VERSIONS[-1][torch.from_numpy(arm)]
        policy = torch.log_softmax(logits, -1)
        baseline = float((policy.detach().exp() * REWARDS).sum())
        column = torch.ones(512, 1, dtype=torch.bool)
        tokens = Tokens(
            mask=column,
            behaviour=(own if behaviour_of == "own" else newest)[:, None],
            advantages=(REWARDS[torch.from_numpy(arm)] - baseline)[:, None],
        )
        weights = aggregation_weights("token_mean", column, torch.arange(512))
        entropy = -(policy.exp() * policy).sum().expand(512, 1)
        total, _ = objective(config, policy[torch.from_numpy(arm)][:, None], entropy, tokens, weights)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        if step >= 200:
            mean += policy.detach().exp().numpy() / 200
    return mean


def test_mixed_versions_learn_the_optimum() -> None:
    """The optimum of E[R] + tau H is softmax(R / tau): reached with the tokens' own log-probabilities alone."""
    optimum = torch.softmax(REWARDS / 0.5, -1).numpy()
    assert np.abs(learn("own") - optimum).max() < 0.02
    assert np.abs(learn("newest") - optimum).max() > 0.05
