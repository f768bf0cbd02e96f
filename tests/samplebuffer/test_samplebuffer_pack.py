"""Which payloads share an object of the store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samplebuffer.ray.pack import DEPTH, packs, weight


class Turn(msgspec.Struct):
    tokens: list[int]
    logprobs: Any


@dataclass
class Episode:
    turns: list[Turn]
    name: str


class Odd:
    def nbytes(self) -> int:
        raise AssertionError("not a size")


@pytest.mark.parametrize(
    ("payload", "bytes_at_least"),
    [
        (bytes(5000), 5000),
        (np.zeros(1000), 8000),
        (memoryview(bytes(300)), 300),
        ([1] * 1000, 8000),
        ({"a": [0.5] * 10, "b": "x" * 100}, 180),
        (Episode([Turn([1, 2], np.zeros(4))] * 10, "abc"), 10 * (16 + 32) + 3),
        ([[[np.zeros(10)]]], 80),
        ((1, {"reward": 0.5, "tokens": np.zeros(100)}), 8 + 8 + 800),
    ],
)
def test_a_payload_weighs_about_what_it_takes(payload: Any, bytes_at_least: int) -> None:
    assert weight(payload) == bytes_at_least


def test_anything_weighs_something_and_a_loop_ends() -> None:
    loop: list[Any] = []
    loop.append(loop)
    values: list[Any] = [None, Odd(), loop, [], {}, object, 3]
    assert all(weight(value) > 0 for value in values)
    assert DEPTH < 10


@given(st.lists(st.integers(0, 50)), st.integers(1, 100))
def test_packs_hold_everything_in_order_up_to_the_limit(weights: list[int], limit: int) -> None:
    cuts = [weights[cut] for cut in packs(weights, limit)]
    assert [w for cut in cuts for w in cut] == weights
    assert all(cut and sum(cut[:-1]) < limit for cut in cuts)
    assert all(sum(cut) >= limit for cut in cuts[:-1])
