"""Exponential back-off with jitter, as a pure function of the attempt and a random source."""

import random


def backoff(attempt: int, rng: random.Random, first: float = 1.0, last: float = 60.0) -> float:
    """Seconds to wait after the attempt (counted from 0): doubling from `first` to `last`, then cut by up to a
    half, so that those who failed together do not come back together.
    """
    return min(last, first * 2.0 ** min(attempt, 32)) * rng.uniform(0.5, 1.0)
