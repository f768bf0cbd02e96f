"""Micro-batches: rows of a train batch that go through the model at once, cut to what the loss needs.

Invariant: cutting into micro-batches and computing equal contexts once changes no log-probability
(``tests/rollart/test_rollart_trainer.py::test_micro_batches_and_shared_contexts_change_nothing``).
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rollart.trainers.batch import TrainBatch


class MicroBatch(msgspec.Struct, frozen=True, kw_only=True):
    """`contexts` [unique, length] are the distinct inputs; the rest is [rows, columns] at the columns that train.

    Attention is causal and rows are padded on the right, so no padding mask is needed: what follows a position cannot
    change it, and rows with equal tokens up to the last trained column share one forward pass.
    """

    contexts: Tensor
    unique: Tensor
    """[rows] index into `contexts`."""
    positions: Tensor
    """[columns] positions whose logits predict the columns' tokens."""
    targets: Tensor
    columns: NDArray[np.int64]
    rows: NDArray[np.int64]


def micro_batches(batch: TrainBatch, rows: NDArray[np.int64], max_tokens: int) -> Iterator[MicroBatch]:
    """Cuts `rows` into micro-batches of at most `max_tokens` padded tokens (or one row), alike lengths together.

    Every row must hold a trained token.
    """
    ordered = rows[np.argsort(batch.lengths[rows], kind="stable")]
    start = 0
    for end in range(1, len(ordered) + 1):
        full = end == len(ordered) or (end + 1 - start) * batch.lengths[ordered[end]] > max_tokens
        if full:
            yield _micro_batch(batch, ordered[start:end])
            start = end


def _micro_batch(batch: TrainBatch, rows: NDArray[np.int64]) -> MicroBatch:
    columns = np.flatnonzero(batch.loss_mask[rows].any(axis=0))
    inputs = batch.input_ids[rows, : columns[-1]]
    contexts, unique = np.unique(inputs, axis=0, return_inverse=True)
    return MicroBatch(
        contexts=torch.from_numpy(contexts),
        unique=torch.from_numpy(unique.reshape(-1)),
        positions=torch.from_numpy(columns - 1),
        targets=torch.from_numpy(batch.input_ids[np.ix_(rows, columns)]),
        columns=columns,
        rows=rows,
    )


def score(model: nn.Module, micro: MicroBatch, allowed: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the targets and entropies, [rows, columns], as the engine's processed ones are computed:
    tokens outside `allowed` ([rows, vocabulary]) are removed before the softmax.
    """
    logits = model(input_ids=micro.contexts, use_cache=False, logits_to_keep=micro.positions).logits
    logits = logits.float()[micro.unique] / temperature
    forbidden = ~allowed[:, None, :]
    logprobs = torch.log_softmax(logits.masked_fill(forbidden, -torch.inf), dim=-1)
    chosen = logprobs.gather(-1, micro.targets[..., None])[..., 0]
    finite = logprobs.masked_fill(forbidden, 0.0)
    return chosen, -(logprobs.exp() * finite).sum(-1)
