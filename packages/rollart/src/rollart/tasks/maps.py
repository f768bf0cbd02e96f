"""Random solvable lakes: the very ones that Gymnasium's `generate_random_map` draws, many at a time.

Gymnasium draws maps until one can be crossed, and looks at each in Python. Where holes are many hardly any can (one
in 5,700 of 8x8 at 0.3 ice), so here a block of them is drawn at once, each is one 64-bit number, and all are flooded
from their starts together. Held by tests/rollart/test_rollart_frozenlake.py::test_maps_are_gymnasiums.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from gymnasium.utils import seeding

LARGEST = 8
"""Cells of a side: a map's bits fill a word, a byte for each row."""

_ROW = np.uint64(LARGEST)
_STEP = np.uint64(1)
_WEST = np.uint64(0x0101010101010101)  # the first cell of each row, the last one
_EAST = _WEST << np.uint64(LARGEST - 1)
# Most maps of much ice can be crossed; where few can, larger blocks take less time each, while they fit the cache.
_FIRST_BLOCK, _LARGEST_BLOCK = 4, 1024

Words = npt.NDArray[np.uint64]


def random_map(size: int, frozen: float, seed: int) -> tuple[str, ...]:
    """A map that can be crossed, in Gymnasium's letters. Each cell is ice with probability `frozen`."""
    for ice in _blocks(size, frozen, seed):
        crossed = np.flatnonzero(_crossed(_words(ice), size))
        if len(crossed):
            return _letters(ice[crossed[0]])
    raise AssertionError("the blocks are endless")


def _blocks(size: int, frozen: float, seed: int) -> Iterator[npt.NDArray[np.bool_]]:
    """Endless maps in Gymnasium's order, [block, size, size]: where there is ice."""
    random, _ = seeding.np_random(seed)
    # As numpy's `choice` draws among two: by the cumulated probabilities.
    cumulated = np.cumsum([frozen, 1 - frozen])
    limit = cumulated[0] / cumulated[-1]
    block = _FIRST_BLOCK
    while True:
        ice = random.random((block, size, size)) < limit
        ice[:, 0, 0] = ice[:, -1, -1] = True
        yield ice
        block = min(2 * block, _LARGEST_BLOCK)


def _words(ice: npt.NDArray[np.bool_]) -> Words:
    """Each map as a number, cell (row, column) at bit 8 row + column."""
    rows = np.zeros((len(ice), LARGEST), dtype=np.uint8)
    rows[:, : ice.shape[1]] = np.packbits(ice, axis=2, bitorder="little")[:, :, 0]
    return rows.view("<u8")[:, 0]


def _crossed(ice: Words, size: int) -> npt.NDArray[np.bool_]:
    """Which maps have a way over the ice from the first cell to the last."""
    goal = np.uint64(1 << (LARGEST * (size - 1) + size - 1))
    crossed = np.zeros(len(ice), dtype=np.bool_)
    place = np.arange(len(ice))  # of the maps whose water still spreads
    flood = np.full(len(ice), 1, dtype=np.uint64)
    while len(place):
        sideways = ((flood & ~_EAST) << _STEP) | ((flood & ~_WEST) >> _STEP)
        wider = (flood | sideways | (flood << _ROW) | (flood >> _ROW)) & ice
        there = (wider & goal) != 0
        crossed[place[there]] = True
        spreads = (wider != flood) & ~there
        place, flood, ice = place[spreads], wider[spreads], ice[spreads]
    return crossed


def _letters(ice: npt.NDArray[np.bool_]) -> tuple[str, ...]:
    rows = ["".join("F" if cell else "H" for cell in row) for row in ice]
    rows[0] = "S" + rows[0][1:]
    rows[-1] = rows[-1][:-1] + "G"
    return tuple(rows)
