"""How long the kept trajectories were, and how long those that were not.

Redundancy and staleness end the long ones first. Comparing the histograms shows how much of that bias there is.
Invariant: each measured trajectory is counted once, under its fate (tests/samplebuffer/test_samplebuffer_metrics.py).
"""

from __future__ import annotations

from collections import Counter

import msgspec

from samplebuffer.values import Fate


class Histogram(msgspec.Struct, frozen=True):
    """`buckets[i]` counts lengths of at most `2**i` that no bucket before counts."""

    count: int
    sum: int
    buckets: list[int]

    @property
    def mean(self) -> float:
        """The average length."""
        return self.sum / self.count if self.count else 0.0


class Lengths:
    """Counts lengths by fate, in powers of two."""

    def __init__(self) -> None:
        self._buckets: dict[Fate, Counter[int]] = {}
        self._sums: Counter[Fate] = Counter()

    def add(self, fate: Fate, length: int) -> None:
        """Count one trajectory."""
        self._buckets.setdefault(fate, Counter())[max(length - 1, 0).bit_length()] += 1
        self._sums[fate] += length

    def histograms(self) -> dict[Fate, Histogram]:
        """One histogram for each fate seen."""
        return {
            fate: Histogram(buckets.total(), self._sums[fate], [buckets[i] for i in range(max(buckets) + 1)])
            for fate, buckets in self._buckets.items()
        }
