"""Distributions have the mean that was asked for, and stay within their limits."""

from __future__ import annotations

from math import inf
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.simulate.spread import Spread


@pytest.mark.parametrize(
    "spread",
    [
        Spread(mean=200, std=80),
        Spread(mean=10, std=1, shape="normal"),
        Spread(shape="uniform", low=5, high=30),
        Spread(mean=3),
    ],
)
def test_the_mean_is_the_one_asked_for(spread: Spread) -> None:
    draw, random = spread.sampler(), Random(0)
    assert sum(draw(random) for _ in range(20_000)) / 20_000 == pytest.approx(spread.average, rel=0.02)


@pytest.mark.parametrize("most", [0.0, 4.0, 8.0, 12.0, 25.0, inf])
@pytest.mark.parametrize(
    "spread",
    [
        Spread(mean=10, std=8),
        Spread(mean=10, std=8, high=20),
        Spread(mean=10, std=2, shape="normal"),
        Spread(shape="uniform", low=5, high=15),
        Spread(mean=10),
    ],
)
def test_the_mean_of_what_is_cut_is_that_of_cut_samples(spread: Spread, most: float) -> None:
    draw, random = spread.sampler(), Random(0)
    mean = sum(min(most, draw(random)) for _ in range(20_000)) / 20_000
    assert spread.cut(most) == pytest.approx(mean, rel=0.02)


@given(st.floats(0.1, 100), st.floats(0, 100), st.sampled_from(["lognormal", "normal"]), st.integers(0, 100))
def test_samples_stay_within_their_limits(mean: float, std: float, shape: str, seed: int) -> None:
    draw = Spread(mean=mean, std=std, shape=shape, low=1.0, high=50.0).sampler()  # type: ignore[arg-type]
    random = Random(seed)
    assert all(1.0 <= draw(random) <= 50.0 for _ in range(20))
