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
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

from rollart.tasks.maps import LARGEST, random_map

# Streams of map seeds: far apart, so that a run's training seeds and the evaluation's are other numbers too.
_EVAL_STREAM = 10_000_000
_TRAIN_STREAM = 20_000_000
_STREAM_LENGTH = 1_000_000
_PREFIX = "map-"


@lru_cache(maxsize=65_536)
def _grid(size: int, frozen: float, map_seed: int) -> tuple[str, ...]:
    return random_map(size, frozen, map_seed)


class _Lake:
    """A map's moves, as Gymnasium has them, and its pictures. Its episodes share it, so a step costs two look-ups."""

    def __init__(self, grid: tuple[str, ...], view: int | None) -> None:
        cells: dict[int, dict[int, list[tuple[float, int, int, bool]]]]
        cells = FrozenLakeEnv(desc=list(grid), is_slippery=False).P
        # On ice that is not slippery a move has one outcome.
        self.moves = [
            [(int(to), float(pays), bool(ends)) for [(_, to, pays, ends)] in cells[at].values()] for at in cells
        ]
        self.pictures = [_picture(grid, cell, view) for cell in cells]
        self.start = "".join(grid).index("S")


@lru_cache(maxsize=4096)
def _lake(grid: tuple[str, ...], view: int | None) -> _Lake:
    return _Lake(grid, view)


class FrozenLakeGame:
    """One episode's environment: Gymnasium's five-tuple with text in and text out."""

    blocking = False  # a step takes microseconds: it may run on the event loop

    def __init__(
        self, task: str, grid: tuple[str, ...], actions: tuple[str, ...], max_turns: int, view: int | None
    ) -> None:
        self.task = task
        self.grid = grid
        self.turns = 0
        self._moves = {symbol: move for move, symbol in enumerate(actions)}
        self._max_turns = max_turns
        self._lake = _lake(grid, view)
        self._cell = self._lake.start

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.turns, self._cell = 0, self._lake.start
        return self._lake.pictures[self._cell], {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Moves by the last symbol of `action`; symbols before it are scratch, and an unknown one stands still."""
        self.turns += 1
        move = self._moves.get(action[-1:])
        reward, terminated = 0.0, False
        if move is not None:
            self._cell, reward, terminated = self._lake.moves[self._cell][move]
        truncated = not terminated and self.turns >= self._max_turns
        return self._lake.pictures[self._cell], reward, terminated, truncated, {"invalid": move is None}


def _picture(grid: tuple[str, ...], cell: int, view: int | None) -> str:
    row, column = divmod(cell, len(grid))
    lines = list(grid)
    lines[row] = lines[row][:column] + "P" + lines[row][column + 1 :]
    if view is not None:
        lines = _window(lines, row, column, view // 2)
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
            ("size", self.size, 2 <= self.size <= LARGEST, f"2 to {LARGEST}"),
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
