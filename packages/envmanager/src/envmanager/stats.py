"""What a scheduler did, counted: ends by answer, failures by kind, and the lengths of what was kept against
what was cut.

Invariant: started = running + parked + scoring + finished + failed + cancelled at every instant
(test_envmanager_scheduler.py::test_nothing_is_alive_after_any_interleaving).
"""

from collections import Counter

import msgspec


class Histogram(msgspec.Struct):
    """Counts by powers of two: bucket b holds the values in [b, 2b), and bucket 0 the zeros."""

    buckets: dict[int, int] = {}
    count: int = 0
    total: int = 0

    def add(self, value: int) -> None:
        bucket = 1 << (value.bit_length() - 1) if value > 0 else 0
        self.buckets[bucket] = self.buckets.get(bucket, 0) + 1
        self.count += 1
        self.total += value

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0


class Lengths(msgspec.Struct):
    """Turns and generated tokens of some trajectories."""

    turns: Histogram = msgspec.field(default_factory=Histogram)
    tokens: Histogram = msgspec.field(default_factory=Histogram)

    def add(self, turns: int, tokens: int) -> None:
        self.turns.add(turns)
        self.tokens.add(tokens)


class Stats(msgspec.Struct):
    """`kept` are the accepted. `cut` are the cancelled, at the length where they were, and the finished
    that were not accepted: where its mean differs much from the mean of `kept`, redundancy or staleness
    favours short (or long) episodes. `parked` wait for the circuit of their backend.
    """

    started: int = 0
    running: int = 0
    parked: int = 0
    scoring: int = 0
    finished: Counter[str] = msgspec.field(default_factory=Counter)
    failed: Counter[str] = msgspec.field(default_factory=Counter)
    cancelled: Counter[str] = msgspec.field(default_factory=Counter)
    retries: int = 0
    kept: Lengths = msgspec.field(default_factory=Lengths)
    cut: Lengths = msgspec.field(default_factory=Lengths)
