"""The book of members: the ledger's counts, and who is alive at which start version.

Invariants: the ledger balances after each entry, because each moves exactly one member; the index by version holds
exactly the alive members, so finding the stale costs what there is of them, not what is alive
(tests/samplebuffer/test_samplebuffer_machine.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from samplebuffer.lengths import Lengths
from samplebuffer.ticket import Ticket
from samplebuffer.values import Batch, Fate, Ledger, Sample


class Staleness(msgspec.Struct, frozen=True):
    """How far members are behind a version: how many, on average, at most."""

    count: int = 0
    mean: float = 0.0
    max: int = 0


class Book:
    """Counts and indexes members; decides nothing."""

    def __init__(self, issued: int = 0, ended: dict[Fate, int] | None = None) -> None:
        self.issued = issued
        self.ended: dict[Fate, int] = {
            "delivered": 0,
            "surplus": 0,
            "stale": 0,
            "filtered": 0,
            "failed": 0,
            "cancelled": 0,
        }
        self.ended.update(ended or {})
        self.running: dict[int, dict[int, int]] = {}  # version -> ticket id -> group id
        self.buffered: dict[int, dict[int, int]] = {}
        self.lengths = Lengths()
        self.delivered_staleness: Counter[int] = Counter()
        self.delivered_lag: Counter[int] = Counter()

    def issue(self, ticket: Ticket) -> None:
        """Enter a new running member."""
        self.issued += 1
        _enter(self.running, ticket.issued_version, ticket.id, ticket.group_id)

    def stamp(self, ticket: Ticket, version: int) -> None:
        """Move a running member to its start version."""
        if version != ticket.issued_version:
            _leave(self.running, ticket.issued_version, ticket.id)
            _enter(self.running, version, ticket.id, ticket.group_id)

    def finish(self, ticket: Ticket, sample: Sample) -> None:
        """Move a running member to the buffered ones."""
        _leave(self.running, sample.start_version, ticket.id)
        _enter(self.buffered, sample.start_version, ticket.id, ticket.group_id)

    def restore(self, sample: Sample, group_id: int) -> None:
        """Enter a buffered member that was issued before."""
        _enter(self.buffered, sample.start_version, sample.ticket_id, group_id)

    def end_running(self, ticket: Ticket, fate: Fate) -> None:
        """Strike a running member."""
        _leave(self.running, ticket.bound, ticket.id)
        self.ended[fate] += 1

    def end_buffered(self, sample: Sample, fate: Fate) -> None:
        """Strike a buffered member."""
        _leave(self.buffered, sample.start_version, sample.ticket_id)
        self.ended[fate] += 1
        if sample.length is not None:
            self.lengths.add(fate, sample.length)

    def count_delivered(self, batch: Batch, by: int = 1) -> None:
        """Count how far behind the samples of a batch are; `by=-1` takes it back."""
        for group in batch.groups:
            for sample in group.samples:
                self.delivered_staleness[batch.version - sample.start_version] += by
                self.delivered_lag[batch.trainer_version - sample.start_version] += by

    def groups_below(self, version: int) -> set[int]:
        """The groups that have a member with a start version below this one."""
        return {
            group_id
            for index in (self.running, self.buffered)
            for start, members in index.items()
            if start < version
            for group_id in members.values()
        }

    @property
    def ledger(self) -> Ledger:
        """The counts of this moment."""
        return Ledger(self.issued, _size(self.running), _size(self.buffered), **self.ended)


def staleness(index: dict[int, dict[int, int]], version: int) -> Staleness:
    """How far the members of an index are behind a version."""
    return staleness_of([(version - start, len(members)) for start, members in index.items()])


def staleness_of(counts: Iterable[tuple[int, int]]) -> Staleness:
    """Summarize (staleness, how many) pairs."""
    pairs = [(behind, many) for behind, many in counts if many]
    total = sum(many for _, many in pairs)
    if not total:
        return Staleness()
    return Staleness(total, sum(behind * many for behind, many in pairs) / total, max(behind for behind, _ in pairs))


def _enter(index: dict[int, dict[int, int]], version: int, ticket_id: int, group_id: int) -> None:
    members = index.get(version)
    if members is None:
        members = index[version] = {}
    members[ticket_id] = group_id


def _leave(index: dict[int, dict[int, int]], version: int, ticket_id: int) -> None:
    members = index[version]
    del members[ticket_id]
    if not members:
        del index[version]


def _size(index: dict[int, dict[int, int]]) -> int:
    return sum(map(len, index.values()))
