"""Which rows each optimizer update of a train step takes.

Invariants (``tests/rollart/test_rollart_trainer_schedule.py``)
- Every trained row is in exactly one minibatch of each pass; no trajectory, or no group, is cut.
- The schedule is drawn from (seed, step), so a restored trainer goes on with the same one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rollart.trainers.batch import TrainBatch
from rollart.trainers.config import TrainerConfig
from rollart.trainers.micro_batch import Rows


def minibatches(batch: TrainBatch, config: TrainerConfig, step: int) -> Iterator[Rows]:
    """The rows of each update, in order: `ppo_epochs` passes, each shuffled anew and cut into `minibatches`."""
    rows = batch.trained_rows
    owner = batch.trajectory[rows]
    if config.minibatch_of == "groups":
        owner = batch.group[owner]
    owners = np.unique(owner)
    random = np.random.default_rng((config.seed or 0, step))
    for _ in range(config.ppo_epochs):
        random.shuffle(owners)
        for part in np.array_split(owners, min(config.minibatches, len(owners))):
            yield rows[np.isin(owner, part)]
