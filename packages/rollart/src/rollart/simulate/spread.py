"""Distributions of lengths and latencies, as data and as fast samplers.

Invariant: the mean of many samples is the mean that was asked for, within what clipping takes
(tests/rollart/test_rollart_simulate_spread.py).
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp, inf, log, sqrt
from random import Random
from typing import Literal

from msgspec import Struct

Sampler = Callable[[Random], float]


class Spread(Struct, frozen=True, forbid_unknown_fields=True):
    """A positive quantity. `lognormal` and `normal` have `mean` and `std`, clipped to `low` and `high`; `uniform`
    lies between them.
    """

    mean: float = 0.0
    std: float = 0.0
    shape: Literal["lognormal", "normal", "uniform"] = "lognormal"
    low: float = 0.0
    high: float = inf

    @property
    def average(self) -> float:
        """The mean before clipping."""
        return (self.low + self.high) / 2 if self.shape == "uniform" else self.mean

    def sampler(self) -> Sampler:
        """A function that draws from it."""
        low, high, mean, std = self.low, self.high, self.mean, self.std
        if self.shape == "uniform":
            return lambda random: random.uniform(low, high)
        if not std or not mean:
            fixed = min(high, max(low, mean))
            return lambda random: fixed
        if self.shape == "normal":
            return lambda random: min(high, max(low, random.gauss(mean, std)))
        sigma = sqrt(log(1 + (std / mean) ** 2))
        mu = log(mean) - sigma * sigma / 2
        return lambda random: min(high, max(low, exp(random.gauss(mu, sigma))))
