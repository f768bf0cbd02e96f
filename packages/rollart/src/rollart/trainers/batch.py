"""From finished groups of trajectories to the padded arrays of one train step.

A row is one context segment: a turn that starts a new segment starts a row, any other turn appends its prompt tokens
and its generated tokens to the row it continues. Nothing is re-tokenized.

Invariants
- Every generated token appears in exactly one row, with its own log-probability, version and advantage
  (``test_every_token_arrives_once``).
- The loss mask marks generated tokens and nothing else (``test_only_generated_tokens_train``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from rollart.algorithms import AdvantageName, trajectory_advantages

NO_VERSION = -1  # of tokens that no model generated


class TurnLike(Protocol):
    """One turn: the tokens it added to the context, then the tokens that were generated."""

    @property
    def prompt_ids(self) -> Sequence[int]: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[float]: ...
    @property
    def spans(self) -> Sequence[Any]: ...  # (version, start, end) of the generated tokens
    @property
    def new_segment(self) -> bool: ...


class TrajectoryLike(Protocol):
    """A finished episode with its reward."""

    @property
    def task(self) -> str: ...
    @property
    def turns(self) -> Sequence[TurnLike]: ...
    @property
    def reward(self) -> float | None: ...


class TrainBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Arrays of [rows, tokens] unless said otherwise; a token's values stand at the token's own position."""

    input_ids: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    behaviour_logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    versions: NDArray[np.int32]
    lengths: NDArray[np.int64]
    """[rows] tokens of the row; the rest is padding."""
    trajectory: NDArray[np.int64]
    """[rows] index of the row's trajectory in the batch."""
    group: NDArray[np.int64]
    """[trajectories] index of the trajectory's group."""
    rewards: NDArray[np.float32]
    """[trajectories]"""
    allowed: NDArray[np.int64]
    """[rows] index into `allowed_sets`: the tokens the engine could choose from."""
    allowed_sets: tuple[tuple[int, ...], ...]
    """Sets of token ids; the empty set means the whole vocabulary."""

    @property
    def rows(self) -> int:
        return int(self.input_ids.shape[0])

    @property
    def trained_rows(self) -> NDArray[np.int64]:
        """Indices of the rows that hold a trained token."""
        return np.flatnonzero(self.loss_mask.any(axis=1))

    @property
    def trained_tokens(self) -> int:
        return int(self.loss_mask.sum())


class _Row:
    """One segment under construction."""

    def __init__(self, trajectory: int, allowed: int) -> None:
        self.trajectory = trajectory
        self.allowed = allowed
        self.ids: list[int] = []
        self.mask: list[bool] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []

    def append(self, turn: TurnLike) -> None:
        context, generated = len(turn.prompt_ids), len(turn.token_ids)
        if not context and not self.ids:
            raise ValueError("the first turn of a segment has no prompt_ids; a generation needs a context")
        if len(turn.logprobs) != generated:
            raise ValueError(
                f"turn has {generated} token_ids and {len(turn.logprobs)} logprobs; give one for each token"
            )
        if not all(map(math.isfinite, turn.logprobs)):
            raise ValueError(f"turn has logprobs {[p for p in turn.logprobs if not math.isfinite(p)]}; give numbers")
        self.ids += [*turn.prompt_ids, *turn.token_ids]
        self.mask += [False] * context + [True] * generated
        self.logprobs += [0.0] * context + list(turn.logprobs)
        self.versions += [NO_VERSION] * context + _token_versions(turn.spans, generated)


def _token_versions(spans: Sequence[Any], generated: int) -> list[int]:
    versions = [NO_VERSION] * generated
    for version, start, end in (span if isinstance(span, tuple) else msgspec.structs.astuple(span) for span in spans):
        versions[start:end] = [version] * (end - start)
    if len(versions) != generated or NO_VERSION in versions:
        raise ValueError(f"spans are {list(spans)!r}; give spans that cover the turn's {generated} tokens")
    return versions


def _rows(trajectory: TrajectoryLike, index: int, allowed: int) -> list[_Row]:
    rows: list[_Row] = []
    for turn in trajectory.turns:
        if turn.new_segment or not rows:
            rows.append(_Row(index, allowed))
        rows[-1].append(turn)
    return rows


def _padded(rows: Sequence[Sequence[Any]], dtype: Any, fill: Any) -> NDArray[Any]:
    lengths = np.array([len(row) for row in rows])
    array = np.full((len(rows), lengths.max()), fill, dtype=dtype)
    array[np.arange(lengths.max()) < lengths[:, None]] = np.fromiter(chain.from_iterable(rows), dtype, lengths.sum())
    return array


def build_batch(
    groups: Sequence[Sequence[TrajectoryLike]],
    *,
    advantage: AdvantageName = "group_normalized",
    allowed: Mapping[str, Sequence[int]] | None = None,
    pad_id: int = 0,
) -> TrainBatch:
    """Builds the batch of one train step; `allowed` gives the token ids that a task's generations were limited to."""
    trajectories = [trajectory for group in groups for trajectory in group]
    if not any(trajectory.turns for trajectory in trajectories):
        raise ValueError("groups hold no turns; give at least one trajectory with a turn")
    sets: dict[tuple[int, ...], int] = {}
    limits = {task: tuple(sorted(ids)) for task, ids in (allowed or {}).items()}
    rows: list[_Row] = []
    for index, trajectory in enumerate(trajectories):
        limit = sets.setdefault(limits.get(trajectory.task, ()), len(sets))
        rows += _rows(trajectory, index, limit)
    group = np.repeat(np.arange(len(groups)), [len(members) for members in groups])
    rewards = np.array([_reward(trajectory) for trajectory in trajectories], dtype=np.float64)
    scores = trajectory_advantages(advantage, torch.from_numpy(rewards), torch.from_numpy(group)).numpy()
    owner = np.array([row.trajectory for row in rows])
    loss_mask = _padded([row.mask for row in rows], np.bool_, False)
    return TrainBatch(
        input_ids=_padded([row.ids for row in rows], np.int64, pad_id),
        loss_mask=loss_mask,
        behaviour_logprobs=_padded([row.logprobs for row in rows], np.float32, 0.0),
        advantages=np.where(loss_mask, scores[owner][:, None], 0.0).astype(np.float32),
        versions=_padded([row.versions for row in rows], np.int32, NO_VERSION),
        lengths=np.array([len(row.ids) for row in rows]),
        trajectory=owner,
        group=group,
        rewards=rewards.astype(np.float32),
        allowed=np.array([row.allowed for row in rows]),
        allowed_sets=tuple(sets),
    )


def _reward(trajectory: TrajectoryLike) -> float:
    if trajectory.reward is None:
        raise ValueError("a trajectory's reward is None; compute rewards before the batch is built")
    return trajectory.reward
