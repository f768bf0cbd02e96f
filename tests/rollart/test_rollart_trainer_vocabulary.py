"""Log-probabilities in pieces and over ranks: values and gradients of a plain float64 log-softmax."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollart.trainers import vocabulary
from rollart.trainers.vocabulary import token_logprobs

TOKENS, WIDTH, VOCABULARY = 11, 6, 20


def inputs(seed=0):
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(TOKENS, WIDTH, generator=random)
    weight = torch.randn(VOCABULARY, WIDTH, generator=random)
    allowed = torch.rand(3, VOCABULARY, generator=random) < 0.5
    allowed[:, 4:9] = True
    allowed[2] = True
    sets = torch.randint(0, 3, (TOKENS,), generator=random)
    return hidden, weight, torch.randint(4, 9, (TOKENS,), generator=random), allowed, sets


def plain(hidden, weight, targets, allowed, sets, temperature):
    """Independently, in float64, by autograd."""
    logits = hidden.double() @ weight.double().T / temperature
    if allowed is not None:
        logits = logits.masked_fill(~allowed[sets], -torch.inf)
    logs = torch.log_softmax(logits, -1)
    entropy = -(logs.exp() * torch.where(logs.isfinite(), logs, 0.0)).sum(-1)
    return logs.gather(-1, targets[:, None])[:, 0], entropy


@pytest.mark.parametrize("piece", [1, 4, 100])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy_weight", [0.0, 0.3])
def test_values_and_gradients(piece, masked, temperature, entropy_weight):
    hidden, weight, targets, allowed, sets = inputs()
    allowed = allowed if masked else None
    pull = torch.linspace(-1, 1, TOKENS)
    gradients = []
    for function, options in (
        (token_logprobs, {"logits_bytes": 4 * VOCABULARY * piece, "sets": sets, "allowed": allowed}),
        (lambda h, w, t, temperature: plain(h, w, t, allowed, sets, temperature), {}),
    ):
        h, w = hidden.clone().requires_grad_(True), weight.clone().requires_grad_(True)
        logprobs, entropy = function(h, w, targets, temperature=temperature, **options)
        loss = (logprobs * pull).sum()
        if entropy_weight:
            loss = loss + entropy_weight * (entropy * pull.flip(0)).sum()
        loss.backward()
        gradients.append((logprobs.detach(), entropy.detach(), h.grad, w.grad))
    for ours, expected in zip(*gradients, strict=True):
        np.testing.assert_allclose(ours.numpy(), expected.numpy(), atol=2e-6, rtol=1e-5)


def test_parts_of_the_vocabulary_add_up(monkeypatch):
    """Two ranks, played in one process: their statistics are summed as an all-reduce does."""
    hidden, weight, targets, allowed, sets = inputs(3)
    half = VOCABULARY // 2
    parts = [
        (vocabulary._logits(hidden, weight[part], allowed[:, part], sets, 1.0), targets - part.start)
        for part in (slice(0, half), slice(half, VOCABULARY))
    ]
    top = torch.stack([logits.amax(-1) for logits, _ in parts]).amax(0)
    sums = []

    def record(tensor, op=None, group=None):
        if tensor.dim() == 1:
            tensor.copy_(top)
        else:
            sums.append(tensor.clone())
            tensor.copy_(sum(sums))

    monkeypatch.setattr(torch.distributed, "all_reduce", record)
    for logits, local in parts:
        chosen, norm, entropy = vocabulary._statistics(logits, local, "group")
    expected, expected_entropy = plain(hidden, weight, targets, allowed, sets, 1.0)
    np.testing.assert_allclose((chosen - norm).numpy(), expected.numpy(), atol=1e-6, rtol=1e-5)
    np.testing.assert_allclose(entropy.numpy(), expected_entropy.numpy(), atol=1e-6, rtol=1e-5)


def test_logits_stay_within_their_bytes(monkeypatch):
    """However many tokens there are, no float32 [tokens, vocabulary] array above the bound is made."""
    sizes = []
    original = vocabulary._logits

    def measured(*arguments):
        logits = original(*arguments)
        sizes.append(logits.numel() * 4)
        return logits

    monkeypatch.setattr(vocabulary, "_logits", measured)
    hidden, weight = torch.randn(400, 8, requires_grad=True), torch.randn(500, 8, requires_grad=True)
    limit = 64 * 500 * 4
    logprobs, _ = token_logprobs(hidden, weight, torch.zeros(400, dtype=torch.long), logits_bytes=limit)
    saved = [tensor for tensor in logprobs.grad_fn.saved_tensors if tensor is not None]
    assert max(tensor.numel() for tensor in saved) <= max(hidden.numel(), weight.numel())
    logprobs.sum().backward()
    assert len(sizes) == 2 * 7, "forward, and again for the gradient"
    assert max(sizes) <= limit


def test_bfloat16_sums_its_pieces_in_float32():
    hidden, weight, targets, *_ = inputs()
    h, w = hidden.bfloat16().requires_grad_(True), weight.bfloat16().requires_grad_(True)
    logprobs, _ = token_logprobs(h, w, targets, logits_bytes=4 * VOCABULARY)
    assert logprobs.dtype == torch.float32
    logprobs.sum().backward()
    assert w.grad.dtype == torch.bfloat16
    expected, _ = plain(h.detach(), w.detach(), targets, None, None, 1.0)
    np.testing.assert_allclose(logprobs.detach().numpy(), expected.numpy(), atol=0.05)
