"""Sizes: what they allow, and what is refused."""

from __future__ import annotations

from fractions import Fraction
from math import ceil, floor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samplebuffer import InvalidConfig, SampleBuffer
from samplebuffer.limits import make_limits

GOOD = {
    "batch_groups": 4,
    "group_size": 2,
    "alpha": 1,
    "spare_groups": 0,
    "spare_members": 0,
    "max_replacements": None,
}


@pytest.mark.parametrize(
    ("alpha", "batch_groups", "capacity", "staleness"),
    [
        (0, 64, 64, 0),
        (1, 64, 128, 1),
        (0.57, 100, 157, 1),
        (1.5, 3, 7, 2),
        (Fraction(1, 3), 3, 4, 1),
        (0.1, 30, 33, 1),
    ],
)
def test_capacity_and_bound(alpha, batch_groups, capacity, staleness) -> None:
    limits = make_limits(**(GOOD | {"alpha": alpha, "batch_groups": batch_groups}))
    assert (limits.capacity, limits.staleness) == (capacity, staleness)


@given(st.integers(0, 10**6), st.integers(1, 10**4), st.integers(0, 100))
def test_a_batch_always_fits(thousandths: int, batch_groups: int, spare: int) -> None:
    limits = make_limits(batch_groups, 2, thousandths / 1000, spare, 0, None)
    exact = 1 + Fraction(thousandths, 1000)
    assert limits.capacity == floor(exact * batch_groups) + spare >= batch_groups
    assert limits.staleness == ceil(exact) - 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("alpha", -0.1),
        ("alpha", float("nan")),
        ("alpha", float("inf")),
        ("alpha", True),
        ("alpha", "much"),
        ("alpha", "1/0"),
        ("alpha", "1e5000"),
        ("alpha", None),
        ("batch_groups", 0),
        ("batch_groups", 1.5),
        ("group_size", 0),
        ("group_size", True),
        ("spare_groups", -1),
        ("spare_members", -1),
        ("max_replacements", -1),
    ],
)
def test_bad_sizes_are_named(field, value) -> None:
    with pytest.raises(InvalidConfig, match=field):
        make_limits(**(GOOD | {field: value}))
    with pytest.raises(ValueError, match="give a"):
        SampleBuffer([], **(GOOD | {field: value}))


@pytest.mark.parametrize("version", [-1, 1.0, "1", True])
def test_a_bad_version_is_named(version) -> None:
    with pytest.raises(InvalidConfig, match="version"):
        SampleBuffer([], batch_groups=1, group_size=1, version=version)
