"""Log-probabilities and entropies of chosen tokens from hidden states, without the whole matrix of logits.

Tokens go through the output layer in pieces, so that never more than a bounded number of logits exists; each tensor-
parallel rank computes its own part of the vocabulary. The backward pass computes a piece's logits again, unless they
all fitted into one.

Invariants
- Pieces and ranks change neither values nor gradients (``tests/rollart/test_rollart_trainer_vocabulary.py``).
- No float32 array of [tokens, vocabulary] exists beyond `logits_bytes` (``test_logits_stay_within_their_bytes``).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    allowed: Tensor | None = None,
    sets: Tensor | None = None,
    temperature: float = 1.0,
    group: Any = None,
    first: int = 0,
    logits_bytes: int = 64 << 20,
) -> tuple[Tensor, Tensor]:
    """Float32 log-probabilities of `targets` and entropies, [tokens], in nats.

    `hidden` is [tokens, width], `weight` [vocabulary, width], `targets` [tokens]. Row `sets[t]` of `allowed`
    ([sets, vocabulary]) holds the tokens that token t was chosen from; others are removed before the softmax. With a
    process `group`, `weight` and `allowed` are this rank's part of the vocabulary, which starts at token `first`.
    """
    piece = max(1, logits_bytes // (4 * weight.shape[0]))
    logprobs, entropy = _TokenLogprobs.apply(
        hidden, weight, targets - first, allowed, sets, temperature, group, piece
    )
    return logprobs, entropy


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        allowed: Tensor | None,
        sets: Tensor | None,
        temperature: float,
        group: Any,
        piece: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.group, ctx.piece = temperature, group, piece
        count = hidden.shape[0]
        chosen, norm, entropy = hidden.new_empty((3, count), dtype=torch.float32)
        kept = None
        for part in _pieces(count, piece):
            logits = _logits(hidden[part], weight, allowed, None if sets is None else sets[part], temperature)
            chosen[part], norm[part], entropy[part] = _statistics(logits, targets[part], group)
            kept = logits if count <= piece and ctx.needs_input_grad[0] else None
        ctx.save_for_backward(hidden, weight, targets, allowed, sets, norm, entropy, kept)
        return chosen - norm, entropy

    @staticmethod
    def backward(ctx: Any, d_logprobs: Tensor | None, d_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, allowed, sets, norm, entropy, kept = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden)
        # Many pieces add up: in bfloat16 the last ones would be lost.
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for part in _pieces(hidden.shape[0], ctx.piece):
            logits = kept
            if logits is None:
                chosen_from = None if sets is None else sets[part]
                logits = _logits(hidden[part], weight, allowed, chosen_from, ctx.temperature)
            gradient = _gradient(
                logits,
                targets[part],
                norm[part],
                entropy[part],
                None if d_logprobs is None else d_logprobs[part],
                None if d_entropy is None else d_entropy[part],
            )
            gradient = gradient.div_(ctx.temperature).to(hidden.dtype)
            d_hidden[part] = gradient @ weight
            if d_weight is not None:
                d_weight += gradient.T @ hidden[part]
        if ctx.group is not None:
            dist.all_reduce(d_hidden, group=ctx.group)
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), *[None] * 6


def _pieces(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _logits(
    hidden: Tensor, weight: Tensor, allowed: Tensor | None, sets: Tensor | None, temperature: float
) -> Tensor:
    logits = (hidden @ weight.T).float()
    if temperature != 1.0:
        logits /= temperature
    return logits if allowed is None else logits.masked_fill_(~allowed[sets], -torch.inf)


def _statistics(logits: Tensor, targets: Tensor, group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The targets' logits, log of the sum of exponentials, and entropies over the vocabulary of all ranks."""
    top = logits.amax(-1)
    if group is not None:
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
    shares = (logits - top[:, None]).exp_()
    here = (targets >= 0) & (targets < logits.shape[-1])
    chosen = logits.gather(-1, targets.clamp(0, logits.shape[-1] - 1)[:, None])[:, 0]
    # A removed token has share 0, and 0 times its logit, -inf, must be 0.
    weighted = (shares * logits.clamp(min=torch.finfo(torch.float32).min)).sum(-1)
    sums = torch.stack([shares.sum(-1), weighted, torch.where(here, chosen, 0.0)])
    if group is not None:
        dist.all_reduce(sums, group=group)
    norm = top + sums[0].log()
    return sums[2], norm, norm - sums[1] / sums[0]


def _gradient(
    logits: Tensor,
    targets: Tensor,
    norm: Tensor,
    entropy: Tensor,
    d_logprobs: Tensor | None,
    d_entropy: Tensor | None,
) -> Tensor:
    """With p the probabilities: d log p_c / d z_j = [j = c] - p_j, and d H / d z_j = -p_j (log p_j + H)."""
    logs = logits - norm[:, None]
    shares = logs.exp()
    gradient = torch.zeros_like(logits)
    if d_entropy is not None:
        finite = logs.clamp_(min=torch.finfo(torch.float32).min)
        gradient -= d_entropy[:, None] * shares * finite.add_(entropy[:, None])
    if d_logprobs is not None:
        gradient -= d_logprobs[:, None] * shares
        here = (targets >= 0) & (targets < logits.shape[-1])
        local = targets.clamp(0, logits.shape[-1] - 1)[:, None]
        gradient.scatter_add_(-1, local, torch.where(here, d_logprobs, 0.0)[:, None])
    return gradient
