"""The objective of a minibatch: a policy loss per token, plus what is common to all losses, summed to one number.

    objective = sum_t w_t [ m_t loss_t + kl_coef KL_t - entropy_coef H_t ]

w_t are the aggregation weights (they sum to 1 over the minibatch, whatever its cut into micro-batches or ranks),
m_t the engine-mismatch correction min(pi_trainer / pi_engine, mismatch_cap).

Invariants
- Masked and filtered tokens are in no sum and in no denominator (``test_masked_tokens_change_nothing``).
- The parts of a minibatch add up to the whole (``test_micro_batches_add_up``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from envmanager.naming import imported
from rollart.algorithms import losses
from rollart.algorithms.losses import Divergence, TokenLoss

LossName = Literal["ppo", "grpo", "decoupled_ppo", "tis", "cispo", "topr", "weighted_topr"]
OwnLoss = Callable[[Tensor, Tensor, Tensor], Tensor | TokenLoss]
"""Of log-probabilities, those of the behaviour policy, and advantages, as the losses here."""
Positive = Annotated[float, Meta(gt=0, le=1e9)]
NonNegative = Annotated[float, Meta(ge=0, le=1e9)]
Share = Annotated[float, Meta(ge=0, le=1)]
Aggregation = Literal["token_mean", "sequence_mean"]
# PPO's are unequal as in DAPO; CISPO bounds the weight from above alone.
_CLIP = {"ppo": (0.2, 0.28), "cispo": (1.0, 4.0)}


class ObjectiveConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which loss, with which bounds. A bound that the loss does not have is not read."""

    loss: str = "tis"
    """Or `ppo`, `grpo`, `decoupled_ppo`, `cispo`, `topr`, `weighted_topr`, or `module:function` of your own."""
    clip_low: Share | None = None
    """The ratio of new to old probability is held above 1 - this in the losses that clip; None is their own: 0.2, and
    1, which is no bound, in cispo."""
    clip_high: NonNegative | None = None
    """And below 1 + this; None is 0.28, in cispo 4."""
    cap: Positive | None = None
    """Truncation of the ratio; None is the loss's own: 2 in tis, 1 in topr and weighted_topr, 5 in decoupled_ppo."""
    positive_weight: NonNegative = 1.0
    """weighted_topr: of tokens whose advantage is not negative."""
    negative_weight: NonNegative = 1.0
    """weighted_topr: of the others."""
    kl: Divergence = "k3"
    """Estimator of the divergence from the initial model: `k1`, `k2`, `k3`."""
    kl_coef: NonNegative = 0.0
    """Weight of that divergence in the loss; above 0 the initial model is kept as the reference."""
    entropy_coef: Annotated[float, Meta(ge=-1e9, le=1e9)] = 0.0
    """Weight of the entropy that is rewarded."""
    aggregation: Aggregation = "token_mean"
    """`token_mean`, or `sequence_mean`: the mean of each sequence's mean."""
    mismatch_cap: Positive | None = None
    """C of min(pi_trainer / pi_engine, C), 5 where it is used; None leaves the correction out. The weight
    pi_prox / mu of decoupled_ppo already is this correction: there C takes the place of `cap`."""
    outlier: Annotated[float, Meta(gt=1, le=1e9)] | None = None
    """Drops tokens whose pi_trainer / pi_engine is outside [1 / outlier, outlier]; None keeps all."""

    @property
    def clip(self) -> tuple[float, float]:
        """`clip_low` and `clip_high`, given or the loss's own."""
        low, high = _CLIP.get(self.loss, _CLIP["ppo"])
        return low if self.clip_low is None else self.clip_low, high if self.clip_high is None else self.clip_high

    @property
    def needs_proximal(self) -> bool:
        """Whether the trainer's own log-probabilities at the start of the train step are needed."""
        return self.loss == "decoupled_ppo" or self.mismatch_cap is not None or self.outlier is not None

    @property
    def needs_reference(self) -> bool:
        """Whether the log-probabilities of the reference model are needed."""
        return self.kl_coef > 0


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """Fixed inputs of [batch, tokens]. `behaviour` are the engine's log-probabilities."""

    mask: Tensor
    behaviour: Tensor
    advantages: Tensor
    proximal: Tensor | None = None
    reference: Tensor | None = None


def keep_mask(config: ObjectiveConfig, tokens: Tokens) -> Tensor:
    """The tokens that train: unmasked, and no outliers between trainer and engine."""
    if config.outlier is None:
        return tokens.mask
    assert tokens.proximal is not None
    return tokens.mask & losses.inlier(tokens.proximal, tokens.behaviour, config.outlier)


def aggregation_weights(aggregation: Aggregation, mask: Tensor, sequence: Tensor) -> Tensor:
    """Each token's share of the mean; `sequence` gives each row's sequence (a sequence may hold several rows).

    token_mean: 1 / tokens. sequence_mean: 1 / (sequences x tokens of the sequence), over sequences with tokens.
    """
    if sequence.shape != mask.shape[:1]:
        raise ValueError(f"sequence has shape {tuple(sequence.shape)}; give one for each of the {len(mask)} rows")
    weights = mask.to(torch.float32)
    if not len(mask):
        return weights
    if aggregation == "token_mean":
        return weights / weights.sum().clamp(min=1)
    _, index = torch.unique(sequence, return_inverse=True)
    lengths = weights.new_zeros(int(index.max()) + 1).index_add_(0, index, weights.sum(1))
    count = (lengths > 0).sum().clamp(min=1)
    return weights / (lengths.clamp(min=1) * count)[index][:, None]


def token_loss(config: ObjectiveConfig, logprobs: Tensor, tokens: Tokens) -> TokenLoss:
    """The configured algorithm on every token."""
    # With the mismatch correction the ratio is against the trainer's own policy; the engine's share is the weight.
    corrected = config.mismatch_cap is not None
    behaviour = tokens.proximal if corrected and tokens.proximal is not None else tokens.behaviour
    advantages = tokens.advantages
    clip = dict(zip(("clip_low", "clip_high"), config.clip, strict=True))
    cap = {} if config.cap is None else {"cap": config.cap}
    match config.loss:
        case "ppo" | "grpo":  # grpo's KL term is the objective's
            return losses.ppo(logprobs, behaviour, advantages, **clip)
        case "decoupled_ppo":
            assert tokens.proximal is not None
            bound = cap if config.mismatch_cap is None else {"cap": config.mismatch_cap}
            return losses.decoupled_ppo(logprobs, tokens.proximal, tokens.behaviour, advantages, **bound, **clip)
        case "tis":
            return losses.tis(logprobs, behaviour, advantages, **cap)
        case "cispo":
            return losses.cispo(logprobs, behaviour, advantages, **clip)
        case "topr":
            return losses.topr(logprobs, behaviour, advantages, **cap)
        case "weighted_topr":
            share = {"positive_weight": config.positive_weight, "negative_weight": config.negative_weight}
            return losses.weighted_topr(logprobs, behaviour, advantages, **cap, **share)
        case name:
            return _own(name, logprobs, behaviour, advantages)


def own_loss(name: str) -> OwnLoss:
    """The function at ``module:function``. Raises UnknownEnv saying why there is none."""
    function: OwnLoss = imported(name)
    return function


def _own(name: str, logprobs: Tensor, behaviour: Tensor, advantages: Tensor) -> TokenLoss:
    """What a loss from elsewhere says, which is a loss for each token or nothing that can be trained on."""
    said = own_loss(name)(logprobs, behaviour, advantages)
    loss, bounded = said if isinstance(said, TokenLoss) else (said, torch.zeros_like(said, dtype=torch.bool))
    if loss.shape != logprobs.shape:
        raise ValueError(
            f"{name} gives shape {tuple(loss.shape)}; give a loss for each token, {tuple(logprobs.shape)}"
        )
    return TokenLoss(loss, bounded)


def objective(
    config: ObjectiveConfig, logprobs: Tensor, entropy: Tensor, tokens: Tokens, weights: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The weighted sum to minimize, and its metrics as weighted sums (names ending in ``_max`` are maxima).

    `weights` come from `aggregation_weights` over the whole minibatch; a token that does not train has weight zero.
    """
    live = weights > 0
    # The values of masked tokens are arbitrary: they must neither overflow nor leave a NaN gradient.
    logprobs = torch.where(live, logprobs, 0.0)
    tokens = _at(tokens, live)
    policy = token_loss(config, logprobs, tokens)
    per_token, extra = policy.loss, {}
    if config.mismatch_cap is not None:
        assert tokens.proximal is not None
        mismatch = losses.mismatch_weight(tokens.proximal, tokens.behaviour, cap=config.mismatch_cap)
        extra["mismatch"] = mismatch
        if config.loss != "decoupled_ppo":
            per_token = mismatch * per_token
    if tokens.reference is not None:
        divergence = losses.divergence(config.kl, logprobs, tokens.reference)
        per_token, extra["kl"] = per_token + config.kl_coef * divergence, divergence
    if config.entropy_coef:
        per_token = per_token - config.entropy_coef * torch.where(live, entropy, 0.0)
    gap = (logprobs - tokens.behaviour).detach()
    values = {
        "loss": per_token,
        "policy_loss": policy.loss,
        "entropy": torch.where(live, entropy, 0.0),
        "ratio": losses.ratio(logprobs, tokens.behaviour),
        "bounded": policy.bounded.to(weights.dtype),
        "behaviour_gap": gap.abs(),
        # Tokens drawn from mu estimate KL(mu, pi) without bias by r - 1 - log r.
        "behaviour_kl": losses.k3(tokens.behaviour, logprobs),
        **extra,
    }
    metrics = {name: (weights * value.detach()).sum() for name, value in values.items()}
    metrics["behaviour_gap_max"] = gap.abs()[live].max() if live.any() else torch.zeros_like(metrics["loss"])
    return (weights * per_token).sum(), metrics


def _at(tokens: Tokens, live: Tensor) -> Tokens:
    """The inputs with zeros where nothing trains."""

    def cleared(values: Tensor) -> Tensor:
        return torch.where(live, values, 0.0)

    return Tokens(
        mask=live,
        behaviour=cleared(tokens.behaviour),
        advantages=cleared(tokens.advantages),
        proximal=None if tokens.proximal is None else cleared(tokens.proximal),
        reference=None if tokens.reference is None else cleared(tokens.reference),
    )
