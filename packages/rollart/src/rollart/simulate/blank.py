"""Token ids that are counted and not stored.

A simulated context of 32,000 tokens would be 256 kB of identical integers, built anew every turn. A `Blank` is a list
that holds nothing and says its length; joining two gives a third. Invariant: lengths are those of the lists it
stands for (tests/rollart/test_rollart_simulate_blank.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import Any


class Blank(list[Any]):
    """`size` tokens; `reply` is how many the next generation after them has, `instance` which task instance asks."""

    __slots__ = ("instance", "reply", "size")

    def __init__(self, size: int, reply: int = 0, instance: int = 0) -> None:
        self.size = size
        self.reply = reply
        self.instance = instance

    def __len__(self) -> int:
        return self.size

    def __bool__(self) -> bool:
        return self.size > 0

    def __add__(self, other: Iterable[Any]) -> Blank:
        assert isinstance(other, Sized)
        if isinstance(other, Blank):
            return Blank(self.size + other.size, other.reply, other.instance)
        return Blank(self.size + len(other))

    def __radd__(self, other: list[Any]) -> Blank:
        return Blank(len(other) + self.size, self.reply, self.instance)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list) and len(other) == self.size

    __hash__ = None
