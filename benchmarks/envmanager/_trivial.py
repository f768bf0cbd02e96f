"""An environment that does nothing, so that what is measured is everything else."""

from typing import Any


class Counting:
    """A trivial environment of so many turns."""

    blocking = False

    def __init__(self, turns: int) -> None:
        self.left = turns

    def reset(self, seed: int | None = None) -> Any:
        return "o", {}

    def step(self, action: str) -> Any:
        self.left -= 1
        return "o", 0.0, self.left <= 0, False, {}


def trivial(key: str) -> Counting:
    return Counting(10**6)
