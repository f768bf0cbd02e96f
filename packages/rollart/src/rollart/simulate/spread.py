"""Distributions of lengths and latencies, as data and as fast samplers.

Invariant: the mean of many samples is the mean that was asked for, within what clipping takes
(tests/rollart/test_rollart_simulate_spread.py).
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp, inf, log, sqrt
from random import Random
from statistics import NormalDist
from typing import Annotated, Literal

from msgspec import Meta, Struct

Amount = Annotated[float, Meta(ge=0, le=1e12)]
Sampler = Callable[[Random], float]
_NORMAL = NormalDist()


class Spread(Struct, frozen=True, forbid_unknown_fields=True):
    """A positive quantity. `lognormal` and `normal` have `mean` and `std`, clipped to `low` and `high`; `uniform`
    lies between them.
    """

    mean: Amount = 0.0
    std: Amount = 0.0
    shape: Literal["lognormal", "normal", "uniform"] = "lognormal"
    low: Amount = 0.0
    high: Annotated[float, Meta(ge=0)] = inf

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low {self.low:g} is above high {self.high:g}")
        if self.shape == "uniform" and self.high == inf:
            raise ValueError("a uniform quantity needs high")
        if self.shape != "uniform" and self.low and not self.mean:
            raise ValueError("low without a mean; give mean, or shape uniform")

    @property
    def average(self) -> float:
        """The mean before clipping."""
        return (self.low + self.high) / 2 if self.shape == "uniform" else self.mean

    def cut(self, most: float = inf) -> float:
        """The mean where nothing is above `most` nor `high`."""
        most = min(most, self.high)
        if self.shape == "uniform":
            low, high = self.low, self.high
            return min(most, low) if most <= low else (most * (high - most / 2) - low * low / 2) / (high - low)
        if not self.std or not self.mean or most == inf:
            return min(most, self.mean)
        if self.shape == "normal":
            z = (most - self.mean) / self.std
            return max(0.0, most - self.std * (z * _NORMAL.cdf(z) + _NORMAL.pdf(z)))
        if not most:
            return 0.0
        sigma = sqrt(log(1 + (self.std / self.mean) ** 2))
        z = log(most / self.mean) / sigma
        return self.mean * _NORMAL.cdf(z - sigma / 2) + most * (1 - _NORMAL.cdf(z + sigma / 2))

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
