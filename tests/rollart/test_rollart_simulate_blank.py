"""Blanks are as long as the lists that they stand for."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from llmproxy.checks import check_ids
from rollart.simulate.blank import Blank

lengths = st.integers(0, 50)


@given(lengths, lengths, lengths)
def test_lengths_add_up_as_those_of_lists(a: int, b: int, c: int) -> None:
    joined = [0] * a + Blank(b, 7) + [0] * c
    assert len(joined) == len([0] * a + [0] * b + [0] * c)
    assert bool(joined) == (a + b + c > 0)
    assert joined == [1] * (a + b + c)


def test_the_last_part_says_how_long_the_reply_is() -> None:
    assert (Blank(3, 5) + Blank(4, 9)).reply == 9
    two, one = [1, 2], [1]
    assert (two + Blank(4, 9)).reply == 9
    assert (Blank(4, 9) + one).reply == 0


def test_the_proxy_takes_them_for_token_ids() -> None:
    check_ids("prompt_ids", Blank(32_000))
    assert msgspec.convert(Blank(3), list[int]) == []
