"""Train batches: every token once, segments as rows, masks and versions."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.trainers import build_batch


def turn(prompt, tokens, *, versions=None, new_segment=False, logprobs=None):
    versions = versions or [0] * len(tokens)
    spans = [(version, i, i + 1) for i, version in enumerate(versions)]
    logprobs = logprobs if logprobs is not None else [-(token + 1) / 100 for token in tokens]
    return SimpleNamespace(
        prompt_ids=prompt, token_ids=tokens, logprobs=logprobs, spans=spans, new_segment=new_segment
    )


def trajectory(*turns, reward=0.0, task="FrozenLake"):
    return SimpleNamespace(turns=list(turns), reward=reward, task=task)


tokens = st.lists(st.integers(2, 15), min_size=1, max_size=5)
turns = st.builds(
    lambda prompt, pairs, new: turn(prompt, [t for t, _ in pairs], versions=[v for _, v in pairs], new_segment=new),
    tokens,
    st.lists(st.tuples(st.integers(2, 15), st.integers(0, 9)), min_size=1, max_size=5),
    st.booleans(),
)
groups_of = st.lists(
    st.lists(
        st.builds(
            lambda turns, reward: trajectory(*turns, reward=reward),
            st.lists(turns, min_size=1, max_size=4),
            st.floats(-1, 1),
        ),
        min_size=1,
        max_size=3,
    ),
    min_size=1,
    max_size=3,
)


@given(groups_of)
def test_every_token_arrives_once(groups):
    batch = build_batch(groups)
    arrived = [
        (int(batch.trajectory[row]), int(token), round(float(logprob), 5), int(version))
        for row in range(batch.rows)
        for token, logprob, version, live in zip(
            batch.input_ids[row],
            batch.behaviour_logprobs[row],
            batch.versions[row],
            batch.loss_mask[row],
            strict=True,
        )
        if live
    ]
    sent = [
        (index, token, round(logprob, 5), version)
        for index, member in enumerate(member for group in groups for member in group)
        for part in member.turns
        for token, logprob, (version, _, _) in zip(part.token_ids, part.logprobs, part.spans, strict=True)
    ]
    assert arrived == sent
    assert batch.trained_tokens == len(sent)


@given(groups_of)
def test_rows_are_segments_and_only_generated_tokens_train(groups):
    batch = build_batch(groups)
    members = [member for group in groups for member in group]
    assert batch.rows == sum(1 + sum(part.new_segment for part in member.turns[1:]) for member in members)
    rows = iter(range(batch.rows))
    for index, member in enumerate(members):
        ids: list[int] = []
        mask: list[bool] = []
        for number, part in enumerate(member.turns):
            if part.new_segment and number:
                check_row(batch, next(rows), index, ids, mask)
                ids, mask = [], []
            ids += [*part.prompt_ids, *part.token_ids]
            mask += [False] * len(part.prompt_ids) + [True] * len(part.token_ids)
        check_row(batch, next(rows), index, ids, mask)
    assert not batch.advantages[~batch.loss_mask].any()
    assert (batch.versions[~batch.loss_mask] == -1).all()


def check_row(batch, row, index, ids, mask):
    length = batch.lengths[row]
    assert batch.trajectory[row] == index
    assert batch.input_ids[row, :length].tolist() == ids
    assert batch.loss_mask[row, :length].tolist() == mask
    assert not batch.input_ids[row, length:].any() and not batch.loss_mask[row, length:].any()


def test_advantages_are_the_groups_own():
    member = lambda reward: trajectory(turn([2], [3, 4]), turn([5], [6], new_segment=True), reward=reward)  # noqa: E731
    batch = build_batch([[member(1.0), member(0.0)], [member(1.0), member(1.0)]])
    by_trajectory = [
        np.unique(batch.advantages[batch.trajectory == t][batch.loss_mask[batch.trajectory == t]]) for t in range(4)
    ]
    np.testing.assert_allclose(np.concatenate(by_trajectory), [1, -1, 0, 0], atol=1e-5)
    assert batch.group.tolist() == [0, 0, 1, 1]
    assert batch.rewards.tolist() == [1, 0, 1, 1]


def test_allowed_tokens_follow_the_task():
    batch = build_batch(
        [[trajectory(turn([2], [9])), trajectory(turn([2], [3]), task="math"), trajectory(turn([2], [10]))]],
        allowed={"FrozenLake": [12, 9, 10, 11]},
    )
    assert [batch.allowed_sets[i] for i in batch.allowed] == [(9, 10, 11, 12), (), (9, 10, 11, 12)]


def test_span_structs_are_taken_as_they_come():
    import msgspec

    class Span(msgspec.Struct):
        version: int
        start: int
        end: int

    part = SimpleNamespace(
        prompt_ids=[2],
        token_ids=[3, 4, 5],
        logprobs=[-1.0] * 3,
        spans=[Span(4, 0, 2), Span(5, 2, 3)],
        new_segment=True,
    )
    assert build_batch([[trajectory(part)]]).versions.tolist() == [[-1, 4, 4, 5]]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (trajectory(turn([2], [3], logprobs=[])), "logprobs"),
        (trajectory(turn([2], [3], logprobs=[float("nan")])), "logprobs .*give numbers"),
        (trajectory(turn([2], [3], logprobs=[float("-inf")])), "logprobs .*give numbers"),
        (trajectory(turn([2], [3], versions=[-1])), "spans"),
        (trajectory(turn([], [3])), "prompt_ids"),
        (trajectory(turn([2], [3]), reward=None), "reward"),
        (trajectory(), "no turns"),
    ],
)
def test_bad_trajectories_are_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        build_batch([[bad]])
