"""FrozenLake: walk over a frozen lake from a text picture of it, on Gymnasium's environment.

Invariants
- Training and evaluation never share a map: the side is decided by the map's content, not by its seed, because
  seeds repeat maps (``test_sides_never_share_a_map``).
- ``train_keys(seed)`` is a pure function of the seed, so that skipping the first n keys resumes a run exactly
  (``test_keys_resume_by_skipping``).
- The reward is 1 on the goal and 0 everywhere else, at the limit of turns too (``test_reward_is_sparse``).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import lru_cache
from itertools import count, islice
from typing import Any

import msgspec
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map

# Streams of map seeds: far apart, so that a run's training seeds and the evaluation's are other numbers too.
_EVAL_STREAM = 10_000_000
_TRAIN_STREAM = 20_000_000
_STREAM_LENGTH = 1_000_000
_PREFIX = "map-"


@lru_cache(maxsize=65_536)
def _grid(size: int, frozen: float, map_seed: int) -> tuple[str, ...]:
    return tuple(generate_random_map(size=size, p=frozen, seed=map_seed))


class FrozenLakeGame:
    """One episode's environment: Gymnasium's five-tuple with text in and text out."""

    blocking = False  # a step takes microseconds: it may run on the event loop

    def __init__(
        self, task: str, grid: tuple[str, ...], actions: tuple[str, ...], max_turns: int, view: int | None
    ) -> None:
        self.task = task
        self.grid = grid
        self._view = view
        self.turns = 0
        self._moves = {symbol: move for move, symbol in enumerate(actions)}
        self._max_turns = max_turns
        self._env = FrozenLakeEnv(desc=list(grid), is_slippery=False)

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.turns = 0
        cell, _ = self._env.reset(seed=seed)
        return self._picture(cell), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Moves by the last symbol of `action`; symbols before it are scratch, and an unknown one stands still."""
        self.turns += 1
        move = self._moves.get(action[-1:])
        cell, reward, terminated = int(self._env.s), 0.0, False
        if move is not None:
            cell, reward, terminated, _, _ = self._env.step(move)
        truncated = not terminated and self.turns >= self._max_turns
        return self._picture(cell), float(reward), bool(terminated), truncated, {"invalid": move is None}

    def _picture(self, cell: int) -> str:
        row, column = divmod(int(cell), len(self.grid))
        lines = list(self.grid)
        lines[row] = lines[row][:column] + "P" + lines[row][column + 1 :]
        if self._view is not None:
            lines = _window(lines, row, column, self._view // 2)
        return "\n".join(lines) + "\n>"


def _window(lines: list[str], row: int, column: int, reach: int) -> list[str]:
    """The square of cells within `reach` of one cell, which stands in the middle; ``#`` is beyond the shore."""
    shore = "#" * reach
    wide = [shore + line + shore for line in lines]
    beyond = ["#" * len(wide[0])] * reach
    return [line[column : column + 2 * reach + 1] for line in (beyond + wide + beyond)[row : row + 2 * reach + 1]]


class FrozenLakeTask(msgspec.Struct, frozen=True, kw_only=True):
    """Random solvable lakes of `size` x `size`, each cell frozen with probability `frozen`.

    One map in `eval_every_hash` (by a hash of its content) belongs to the evaluation side. The observation is the
    grid with ``P`` for the player and a closing ``>``; the actions are one symbol each. With `view`, an odd number,
    the player sees the square of that many cells around it instead of the map from above, ``#`` beyond the shore.
    """

    name: str = "FrozenLake"
    size: int = 4
    frozen: float = 0.8
    max_turns: int = 20
    view: int | None = None
    eval_every_hash: int = 4
    actions: tuple[str, ...] = ("L", "D", "R", "U")  # in Gymnasium's order

    def __post_init__(self) -> None:
        for field, value, valid, remedy in (
            ("size", self.size, self.size >= 2, "at least 2"),
            ("frozen", self.frozen, 0.0 < self.frozen <= 1.0, "a probability above 0"),
            (
                "view",
                self.view,
                self.view is None or (self.view >= 3 and self.view % 2 == 1),
                "an odd number from 3 up",
            ),
            ("max_turns", self.max_turns, self.max_turns >= 1, "at least 1"),
            ("eval_every_hash", self.eval_every_hash, self.eval_every_hash >= 2, "at least 2"),
            ("actions", self.actions, len(set(self.actions)) == 4, "four different symbols"),
        ):
            if not valid:
                raise ValueError(f"FrozenLakeTask.{field} is {value!r}; give {remedy}")

    def train_keys(self, seed: int) -> Iterator[str]:
        """The endless keys of a training run."""
        return self._keys(_TRAIN_STREAM + seed * _STREAM_LENGTH, evaluation=False)

    def eval_keys(self, n: int, *, distinct: bool = False) -> list[str]:
        """The first `n` evaluation keys, the same for every run; maps repeat as chance has it unless `distinct`."""
        if not distinct:
            return list(islice(self._keys(_EVAL_STREAM, evaluation=True), n))
        kept: dict[tuple[str, ...], str] = {}
        for key in self._keys(_EVAL_STREAM, evaluation=True):
            if len(kept) == n:
                break
            kept.setdefault(self.grid(key), key)
        return list(kept.values())

    def grid(self, key: str) -> tuple[str, ...]:
        """The map of a key, row by row."""
        number = key.removeprefix(_PREFIX)
        if number == key or not number.isdigit():
            raise ValueError(f"FrozenLake key is {key!r}; give {_PREFIX}NUMBER as train_keys and eval_keys do")
        return _grid(self.size, self.frozen, int(number))

    def make_env(self, key: str) -> FrozenLakeGame:
        return FrozenLakeGame(self.name, self.grid(key), self.actions, self.max_turns, self.view)

    def _keys(self, start: int, evaluation: bool) -> Iterator[str]:
        for number in count(start):
            content = "".join(_grid(self.size, self.frozen, number)).encode()
            if (zlib.crc32(content) % self.eval_every_hash == 0) == evaluation:
                yield f"{_PREFIX}{number}"
