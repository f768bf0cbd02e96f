"""The plain values that leave the buffer: samples, groups, batches, the ledger, and groups that were given up.

Invariant: a ledger balances, `issued = running + buffered + delivered + surplus + stale + filtered + failed +
cancelled`, after every operation (tests/samplebuffer/test_samplebuffer_machine.py).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Answer = Literal["accepted", "surplus", "stale", "ended"]
"""What `finish` says: taken; or too late because the group was full, the bound was passed, or for another end."""

Reason = Literal["surplus", "stale", "failed", "closed"]
"""Why a running ticket was cancelled: group full, bound passed, group given up, buffer closed."""

Fate = Literal["delivered", "surplus", "stale", "filtered", "failed", "cancelled"]
"""The ledger column in which a trajectory ends."""


class Sample(msgspec.Struct, frozen=True):
    """One finished trajectory. `length` is what the `length=` callable said of the payload."""

    ticket_id: int
    member: int
    start_version: int
    reward: float
    payload: Any
    length: int | None = None


class Group(msgspec.Struct, frozen=True):
    """The `group_size` samples of one task instance, in the order in which they finished."""

    key: Any
    group_id: int
    samples: list[Sample]

    @property
    def oldest(self) -> int:
        """The least start version among the samples."""
        return min(sample.start_version for sample in self.samples)


class Ledger(msgspec.Struct, frozen=True):
    """How many tickets were issued, and where each of them is now or has ended."""

    issued: int = 0
    running: int = 0
    buffered: int = 0
    delivered: int = 0
    surplus: int = 0
    stale: int = 0
    filtered: int = 0
    failed: int = 0
    cancelled: int = 0

    @property
    def balanced(self) -> bool:
        """Whether every issued ticket is in exactly one column."""
        ended = self.delivered + self.surplus + self.stale + self.filtered + self.failed + self.cancelled
        return self.issued == self.running + self.buffered + ended


class Batch(msgspec.Struct, frozen=True):
    """Whole groups, oldest start first, with the served version and the ledger of the moment of hand-out.

    `trainer_version` is what the caller of `get_batch` said it is (else the served version); staleness is against
    `version`, lag against `trainer_version`.
    """

    groups: list[Group]
    version: int
    trainer_version: int
    ledger: Ledger

    @property
    def samples(self) -> list[Sample]:
        """The samples of all groups, in order."""
        return [sample for group in self.groups for sample in group.samples]

    @property
    def max_staleness(self) -> int:
        """The largest `version - start_version`; at most ceil(alpha)."""
        return self.version - min(group.oldest for group in self.groups)

    @property
    def max_lag(self) -> int:
        """The largest `trainer_version - start_version`."""
        return self.trainer_version - min(group.oldest for group in self.groups)


class GivenUp(msgspec.Struct, frozen=True):
    """A group that left because its members kept failing: how many were lost, and the last error."""

    key: Any
    group_id: int
    lost: int
    error: str
