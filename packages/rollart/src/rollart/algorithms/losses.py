"""Policy losses: one pure function per algorithm, from [batch, tokens] tensors to a loss per token.

Notation: pi is the policy being trained (carries the gradient), mu the behaviour policy (the engine's own
log-probabilities), r = pi / mu, A the advantage, sg() stops the gradient. Every function returns the loss of each
token and which tokens its bound touched; masks, means and the terms common to all stand in `objective`.

Invariants: values equal an independent float64 reference to 1e-6 and gradients equal finite differences
(``tests/rollart/test_rollart_losses.py``); the ratio always is against the given behaviour log-probabilities, never
against the policy itself, so that no bound is blind (``test_bounds_see_the_behaviour_policy``).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Divergence = Literal["k1", "k2", "k3"]

# exp() of more than this says no more than "far off" and would only overflow.
_MAX_LOG_RATIO = 20.0


class TokenLoss(NamedTuple):
    """A loss per token, and the tokens whose ratio the algorithm's bound changed."""

    loss: Tensor
    bounded: Tensor


def _alike(logprobs: Tensor, **others: Tensor) -> None:
    """Raise ValueError unless each has a value for each token: what is broadcast by chance is wrong in silence."""
    for name, other in others.items():
        if other.shape != logprobs.shape:
            shapes = f"shape {tuple(other.shape)}, logprobs {tuple(logprobs.shape)}"
            raise ValueError(f"{name} has {shapes}; give one value for each token")


def ratio(logprobs: Tensor, behaviour: Tensor) -> Tensor:
    """pi / mu, token by token."""
    _alike(logprobs, behaviour=behaviour)
    return (logprobs - behaviour).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def ppo(
    logprobs: Tensor, behaviour: Tensor, advantages: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2
) -> TokenLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    Source: PPO (arXiv 1707.06347), equation 7; unequal bounds from DAPO (arXiv 2503.14476), equation 10.
    """
    _alike(logprobs, advantages=advantages)
    r = ratio(logprobs, behaviour)
    plain, clipped = r * advantages, r.clamp(1 - clip_low, 1 + clip_high) * advantages
    return TokenLoss(-torch.minimum(plain, clipped), clipped < plain)


def grpo(
    logprobs: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    reference: Tensor | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    beta: float = 0.04,
    kl: Divergence = "k3",
) -> TokenLoss:
    """PPO's clipped term plus beta KL(pi, pi_ref), on group-normalized advantages.

    Source: GRPO (DeepSeekMath, arXiv 2402.03300), equation 3, and equation 4 for its estimator k3; `k1` and `k2` are
    the alternatives. Without `reference` the KL term is left out.
    """
    surrogate = ppo(logprobs, behaviour, advantages, clip_low=clip_low, clip_high=clip_high)
    if reference is None:
        return surrogate
    return surrogate._replace(loss=surrogate.loss + beta * divergence(kl, logprobs, reference))


def decoupled_ppo(
    logprobs: Tensor,
    proximal: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    cap: float = 5.0,
) -> TokenLoss:
    """-min(pi_prox / mu, cap) min(u A, clip(u, 1 - clip_low, 1 + clip_high) A) with u = pi / pi_prox.

    The trust region is around the recent policy pi_prox (here: the policy at the start of the train step), the
    correction for stale data is apart from it. Source: arXiv 2110.00641, eq. 12; AReaL (arXiv 2505.24298), eq. 5.
    """
    weight = ratio(proximal, behaviour).clamp(max=cap).detach()
    surrogate = ppo(logprobs, proximal, advantages, clip_low=clip_low, clip_high=clip_high)
    return surrogate._replace(loss=weight * surrogate.loss)


def tis(logprobs: Tensor, behaviour: Tensor, advantages: Tensor, *, cap: float = 2.0) -> TokenLoss:
    """-sg(min(r, cap)) A log pi: truncated importance sampling.

    Source: V-trace's rho (arXiv 1802.01561), section 4.1, on the policy gradient; Ionides 2008 for the truncation.
    """
    _alike(logprobs, advantages=advantages)
    r = ratio(logprobs, behaviour).detach()
    return TokenLoss(-r.clamp(max=cap) * advantages * logprobs, r > cap)


def cispo(
    logprobs: Tensor, behaviour: Tensor, advantages: Tensor, *, clip_low: float = 1.0, clip_high: float = 4.0
) -> TokenLoss:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi: the weight is clipped, no token loses its gradient.

    Source: CISPO (MiniMax-M1, arXiv 2506.13585), equations 4 and 5; the lower bound is off at clip_low = 1.
    """
    _alike(logprobs, advantages=advantages)
    r = ratio(logprobs, behaviour).detach()
    weight = r.clamp(1 - clip_low, 1 + clip_high)
    return TokenLoss(-weight * advantages * logprobs, weight != r)


def topr(logprobs: Tensor, behaviour: Tensor, advantages: Tensor, *, cap: float = 1.0) -> TokenLoss:
    """-A log pi where A >= 0 and -sg(min(r, cap)) A log pi where A < 0.

    Good trajectories are learned at full weight, bad ones are forgotten only while the policy still makes them.
    Source: TOPR (arXiv 2503.14286), equation 8, with the ratio per token.
    """
    return weighted_topr(logprobs, behaviour, advantages, cap=cap)


def weighted_topr(
    logprobs: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    *,
    cap: float = 1.0,
    positive_weight: float = 1.0,
    negative_weight: float = 1.0,
) -> TokenLoss:
    """TOPR with the positive and the negative set weighted apart.

    Source: TOPR (arXiv 2503.14286), section 3; weights as in ROLL Flash (arXiv 2510.11345).
    """
    _alike(logprobs, advantages=advantages)
    r = ratio(logprobs, behaviour).detach()
    good = advantages >= 0
    weight = torch.where(good, torch.full_like(r, positive_weight), negative_weight * r.clamp(max=cap))
    return TokenLoss(-weight * advantages * logprobs, ~good & (r > cap))


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """log(pi / pi_ref): unbiased as a value, but its gradient is zero in expectation on policy."""
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """(log(pi / pi_ref))^2 / 2: biased as a value, right gradient for KL(pi, pi_ref) on policy."""
    return (logprobs - reference).square() / 2


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """pi_ref / pi - 1 - log(pi_ref / pi): unbiased, never negative. All three: Schulman 2020, "Approximating KL"."""
    d = (reference - logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return torch.expm1(d) - d


def divergence(name: Divergence, logprobs: Tensor, reference: Tensor) -> Tensor:
    """The named estimator of KL(pi, pi_ref), token by token, from tokens drawn from pi."""
    _alike(logprobs, reference=reference)
    return {"k1": k1, "k2": k2, "k3": k3}[name](logprobs, reference)


def mismatch_weight(trainer: Tensor, engine: Tensor, *, cap: float = 5.0) -> Tensor:
    """min(pi_trainer / pi_engine, cap), without gradient: what makes up for an engine that computes another policy.

    `trainer` are the trainer's log-probabilities before the update, `engine` those that came with the tokens. Any of
    the losses above is multiplied by it, its own ratio then being against `trainer`. Source: ROLL Flash
    (arXiv 2510.11345), engine mismatch mitigation; Yao et al. 2025, "Your efficient RL framework secretly brings you
    off-policy RL training".
    """
    return ratio(trainer, engine).clamp(max=cap).detach()


def inlier(trainer: Tensor, engine: Tensor, limit: float) -> Tensor:
    """Whether pi_trainer / pi_engine lies within [1 / limit, limit]; other tokens are outliers that teach noise.

    Source: IcePop (Ling Team 2025, "Every step evolves", arXiv 2510.18855), which masks them two-sided.
    """
    r = ratio(trainer, engine)
    return (r <= limit) & (r >= 1 / limit)
