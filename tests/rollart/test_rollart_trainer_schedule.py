"""The minibatches of a train step: whole trajectories or groups, every row once a pass, the same again for a step."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollart.trainers import TrainBatch, TrainerConfig
from rollart.trainers.schedule import minibatches


def batch_of(rows_of_trajectory, group_size):
    owner = np.repeat(np.arange(len(rows_of_trajectory)), rows_of_trajectory)
    shape = (len(owner), 3)
    mask = np.zeros(shape, dtype=np.bool_)
    mask[:, 2] = True
    zeros = np.zeros(shape, dtype=np.float32)
    return TrainBatch(
        input_ids=np.zeros(shape, dtype=np.int64),
        loss_mask=mask,
        behaviour_logprobs=zeros,
        advantages=zeros,
        versions=np.zeros(shape, dtype=np.int32),
        lengths=np.full(len(owner), 3),
        trajectory=owner,
        group=np.arange(len(rows_of_trajectory)) // group_size,
        rewards=np.zeros(len(rows_of_trajectory), dtype=np.float32),
        allowed=np.zeros(len(owner), dtype=np.int64),
        allowed_sets=((),),
    )


@given(
    rows=st.lists(st.integers(1, 3), min_size=1, max_size=24),
    group_size=st.integers(1, 4),
    cuts=st.integers(1, 6),
    epochs=st.integers(1, 3),
    unit=st.sampled_from(["trajectories", "groups"]),
)
def test_every_row_once_a_pass_and_nothing_cut(rows, group_size, cuts, epochs, unit):
    batch = batch_of(rows, group_size)
    config = TrainerConfig(minibatches=cuts, ppo_epochs=epochs, minibatch_of=unit)
    parts = list(minibatches(batch, config, 7))
    a_pass = len(parts) // epochs
    for epoch in range(epochs):
        one = parts[epoch * a_pass : (epoch + 1) * a_pass]
        assert sorted(np.concatenate(one)) == list(range(batch.rows))
        owners = [batch.trajectory[part] for part in one]
        if unit == "groups":
            owners = [batch.group[owner] for owner in owners]
        seen = [set(owner.tolist()) for owner in owners]
        assert sum(map(len, seen)) == len(set().union(*seen)), "an owner is in two minibatches"
        assert len(one) == min(cuts, len(set().union(*seen)))
    again = list(minibatches(batch, config, 7))
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


def test_passes_differ():
    batch = batch_of([1] * 16, 4)
    parts = list(minibatches(batch, TrainerConfig(minibatches=4, ppo_epochs=2), 0))
    assert not all(np.array_equal(a, b) for a, b in zip(parts[:4], parts[4:], strict=True))
