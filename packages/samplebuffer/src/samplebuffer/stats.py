"""What the buffer tells about itself, as one typed value.

Invariant: reading changes nothing, and costs by the versions alive, not by the members
(tests/samplebuffer/test_samplebuffer_metrics.py).
"""

from __future__ import annotations

from typing import Any

import msgspec

from samplebuffer.book import Staleness
from samplebuffer.lengths import Histogram
from samplebuffer.values import Fate, GivenUp, Ledger


class Groups(msgspec.Struct, frozen=True):
    """Groups by state: alive (of which complete), waiting to be opened, and how they left."""

    alive: int
    complete: int
    waiting: int
    opened: int
    delivered: int
    filtered: int
    given_up: int
    recycled: int


class OffPolicy(msgspec.Struct, frozen=True):
    """Staleness of running members (unstamped ones by their issue version), of queued ones, and at hand-out."""

    in_flight: Staleness
    in_queue: Staleness
    delivered: Staleness
    trainer_lag: Staleness


class Waits(msgspec.Struct, frozen=True):
    """Who waits, and what share of the time since the first `get_batch` some consumer spent in it."""

    producers: int
    consumers: int
    get_batch_s: float
    get_batch_share: float
    patience_s: float
    """The part of `get_batch_s` in which a batch was there already, and waited for groups at the bound."""


class Stats(msgspec.Struct, frozen=True):
    """A snapshot. `lengths` is empty without a `length=` callable; it counts late finishes with what they carried."""

    version: int
    max_staleness: int
    capacity: int
    tasks_drawn: int
    tasks_ended: bool
    ledger: Ledger
    groups: Groups
    off_policy: OffPolicy
    waits: Waits
    lengths: dict[Fate, Histogram]
    callback_errors: int
    given_up: list[GivenUp]

    def as_dict(self) -> dict[str, Any]:
        """The snapshot as nested dictionaries of plain values."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain
