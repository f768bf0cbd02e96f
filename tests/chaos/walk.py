"""A small environment for the chaos runs: short to read, so that an iteration takes little."""

from __future__ import annotations

import random
from typing import Any


class Walk:
    """Four steps along numbers that the seed begins; each step pays when the action says the number's parity."""

    blocking = False

    def __init__(self, key: str) -> None:
        self._random = random.Random(key)

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self._random.seed(seed)
        self._steps = 0
        return self._said(), {"actions": ["even", "odd"]}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        right = len(action) % 2 == self._number % 2
        return self._said(), float(right), self._steps == 4, False, {}

    def _said(self) -> str:
        self._number = self._random.randrange(100)
        return f"{self._number}?"
