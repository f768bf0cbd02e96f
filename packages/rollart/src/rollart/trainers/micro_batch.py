"""Micro-batches: rows of a train batch that go through the model at once, cut to what the loss needs.

Invariants
- Cutting into micro-batches and computing equal contexts once changes no log-probability
  (``tests/rollart/test_rollart_trainer.py::test_micro_batches_and_shared_contexts_change_nothing``).
- Every trained token is in exactly one micro-batch that counts, on one rank (``test_ranks_share_the_rows``).
"""

from __future__ import annotations

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollart.trainers.batch import TrainBatch

Rows = NDArray[np.int64]


class MicroBatch(msgspec.Struct, frozen=True, kw_only=True):
    """`contexts` [unique, length] are the distinct inputs; the rest is [tokens], one entry per trained token.

    Attention is causal and rows are padded on the right, so no padding mask is needed: what follows a position cannot
    change it, and rows with equal tokens up to the last trained column share one forward pass.
    """

    contexts: Tensor
    context: Tensor
    """Index into `contexts`."""
    position: Tensor
    """Position whose output predicts the token."""
    targets: Tensor
    sets: Tensor
    """Index into the batch's `allowed_sets`."""
    row: Tensor
    column: Tensor
    counts: bool
    """False for one that a rank repeats only because passes through a sharded model are collective."""

    @property
    def place(self) -> tuple[Tensor, Tensor]:
        """Index of the tokens in arrays of [rows, tokens]."""
        return self.row, self.column

    def to(self, device: torch.device) -> MicroBatch:
        """What the model reads, on `device`; `place` stays where the batch is."""
        if device.type == "cpu":
            return self
        moved = {
            name: getattr(self, name).to(device) for name in ("contexts", "context", "position", "targets", "sets")
        }
        return msgspec.structs.replace(self, **moved)


def share(batch: TrainBatch, rows: Rows, max_tokens: int, rank: int = 0, ranks: int = 1) -> list[MicroBatch]:
    """The micro-batches of `rank`: at most `max_tokens` padded tokens each (or one row), alike lengths together.

    All ranks are given equally many, because a pass through a sharded model is collective. Every row must hold a
    trained token, and there must be one.
    """
    ordered = rows[np.argsort(batch.lengths[rows], kind="stable")]
    cuts = [_cut(batch, ordered[r::ranks], max_tokens) for r in range(ranks)]
    longest = max(map(len, cuts))
    mine = [_micro_batch(batch, part, counts=True) for part in cuts[rank]]
    return mine + [_micro_batch(batch, cuts[0][0], counts=False)] * (longest - len(mine))


def _cut(batch: TrainBatch, ordered: Rows, max_tokens: int) -> list[Rows]:
    parts: list[Rows] = []
    start = 0
    for end in range(1, len(ordered) + 1):
        if end == len(ordered) or (end + 1 - start) * batch.lengths[ordered[end]] > max_tokens:
            parts.append(ordered[start:end])
            start = end
    return parts


def _micro_batch(batch: TrainBatch, rows: Rows, *, counts: bool) -> MicroBatch:
    local, column = np.nonzero(batch.loss_mask[rows])
    contexts, context = np.unique(batch.input_ids[rows, : column.max()], axis=0, return_inverse=True)
    row = rows[local]
    return MicroBatch(
        contexts=torch.from_numpy(contexts),
        context=torch.from_numpy(context.reshape(-1)[local]),
        position=torch.from_numpy(column - 1),
        targets=torch.from_numpy(batch.input_ids[row, column]),
        sets=torch.from_numpy(batch.allowed[row]),
        row=torch.from_numpy(row),
        column=torch.from_numpy(column),
        counts=counts,
    )
