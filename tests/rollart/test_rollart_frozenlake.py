"""FrozenLake: the split by content, resumable keys, the sparse reward, and Gymnasium's own moves."""

from __future__ import annotations

from itertools import islice
from time import process_time

import pytest
from gymnasium.envs.toy_text.frozen_lake import generate_random_map
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.tasks.frozenlake import FrozenLakeTask
from rollart.tasks.maps import random_map

TASK = FrozenLakeTask()
EVAL = TASK.eval_keys(64)


def test_sides_never_share_a_map():
    evaluation = {TASK.grid(key) for key in TASK.eval_keys(256)}
    training = {TASK.grid(key) for seed in range(3) for key in islice(TASK.train_keys(seed), 500)}
    assert not evaluation & training


@given(seed=st.integers(0, 50), skip=st.integers(0, 60), take=st.integers(1, 20))
@settings(max_examples=25, deadline=None)
def test_keys_resume_by_skipping(seed, skip, take):
    whole = list(islice(TASK.train_keys(seed), skip + take))
    assert list(islice(islice(TASK.train_keys(seed), skip, None), take)) == whole[skip:]


@given(size=st.integers(2, 8), frozen=st.floats(0.6, 1.0), seed=st.integers(0, 2**31))
@settings(max_examples=200, deadline=None)
def test_maps_are_gymnasiums(size, frozen, seed):
    assert random_map(size, frozen, seed) == tuple(generate_random_map(size=size, p=frozen, seed=seed))


@pytest.mark.parametrize("size", range(2, 8))
def test_a_map_of_many_holes_is_gymnasiums_too(size):
    assert random_map(size, 0.35, 3) == tuple(generate_random_map(size=size, p=0.35, seed=3))


def test_large_lakes_of_many_holes_are_there_in_seconds():
    """Looked at one by one in Python, each of these takes a tenth of a second."""
    start = process_time()
    keys = FrozenLakeTask(size=8, frozen=0.3).eval_keys(64)
    assert process_time() - start < 10
    assert all(shortest_walk(FrozenLakeTask(size=8, frozen=0.3).grid(key)) for key in keys)


def test_evaluation_maps_repeat_only_unless_distinct():
    natural = [TASK.grid(key) for key in TASK.eval_keys(256)]
    distinct = [TASK.grid(key) for key in TASK.eval_keys(256, distinct=True)]
    assert len(natural) == len(distinct) == len(set(distinct)) == 256
    assert len(set(natural)) < 256


def shortest_walk(grid):
    """Actions of a shortest path, found without the environment."""
    size = len(grid)
    paths = {(0, 0): ""}
    queue = [(0, 0)]
    for row, column in queue:
        for action, (dr, dc) in zip("LDRU", ((0, -1), (1, 0), (0, 1), (-1, 0)), strict=True):
            r, c = row + dr, column + dc
            if 0 <= r < size and 0 <= c < size and grid[r][c] != "H" and (r, c) not in paths:
                paths[r, c] = paths[row, column] + action
                queue.append((r, c))
    return paths[size - 1, size - 1]


@pytest.mark.parametrize("key", EVAL[:20])
def test_reward_is_sparse(key):
    env = TASK.make_env(key)
    env.reset(seed=0)
    steps = [env.step(action) for action in shortest_walk(env.grid)]
    assert [reward for _, reward, *_ in steps] == [0.0] * (len(steps) - 1) + [1.0]
    assert [terminated for _, _, terminated, *_ in steps] == [False] * (len(steps) - 1) + [True]


def test_a_hole_ends_the_episode_without_reward():
    key = next(key for key in EVAL if TASK.grid(key)[0][1] == "H")
    env = TASK.make_env(key)
    env.reset()
    observation, reward, terminated, truncated, _ = env.step("R")
    assert (reward, terminated, truncated) == (0.0, True, False)
    assert observation[1] == "P"


def test_the_limit_of_turns_truncates_without_reward():
    env = FrozenLakeTask(max_turns=3).make_env(EVAL[0])
    env.reset()
    assert [env.step("L")[1:4] for _ in range(3)] == [(0.0, False, False)] * 2 + [(0.0, False, True)]


def test_picture_shows_the_player():
    env = TASK.make_env(EVAL[0])
    picture, _ = env.reset()
    assert picture == "\n".join(("P" + env.grid[0][1:], *env.grid[1:])) + "\n>"


def test_the_last_symbol_moves_and_an_unknown_one_stands_still():
    key = next(key for key in EVAL if TASK.grid(key)[0][1] == "F")
    env = TASK.make_env(key)
    before, _ = env.reset()
    assert env.step("LD?")[0] == before
    assert env.step("")[4] == {"invalid": True}
    after, *_ = env.step("DLR")
    assert after[:2] == "SP"


def test_reset_starts_again():
    env = TASK.make_env(EVAL[0])
    first, _ = env.reset(seed=1)
    env.step("D")
    assert env.reset(seed=1)[0] == first
    assert env.turns == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [("size", 1), ("size", 9), ("frozen", 0.0), ("max_turns", 0), ("eval_every_hash", 1), ("actions", ("L", "D"))],
)
def test_bad_settings_name_field_value_and_remedy(field, value):
    with pytest.raises(ValueError, match=rf"FrozenLakeTask\.{field} is .*; give"):
        FrozenLakeTask(**{field: value})


@pytest.mark.parametrize("key", ["", "map-", "map--1", "12", "map-x"])
def test_bad_keys_are_refused(key):
    with pytest.raises(ValueError, match="FrozenLake key"):
        TASK.make_env(key)


def test_a_view_is_centred_on_the_player() -> None:
    task = FrozenLakeTask(view=5)
    key = next(task.train_keys(0))
    env = task.make_env(key)
    picture, _ = env.reset(seed=0)
    rows = picture.removesuffix("\n>").split("\n")
    assert [len(row) for row in rows] == [5] * 5
    assert rows[:2] == ["#####"] * 2
    assert rows[2][:3] == "##P"
    whole = FrozenLakeTask(view=7).make_env(key).reset(seed=0)[0].removesuffix("\n>").split("\n")
    assert [row[3:].replace("P", "S") for row in whole[3:]] == list(task.grid(key))
    with pytest.raises(ValueError, match="view is 4"):
        FrozenLakeTask(view=4)
