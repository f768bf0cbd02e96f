"""The one mutable value of a store: which versions it holds, whose it is, and what is being written.

It is written before a publisher puts its first bucket (what a dead one left can be swept without listing keys,
which not every store can do) and after its manifest (which announces the version to those who wait).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from weightsync.errors import BadManifest
from weightsync.manifest import bucket_key, manifest_key

__all__ = ["HOLD_SLOTS", "INDEX", "Entry", "Index", "hold_key"]

INDEX = "index"
# Concurrent pulls of one version that retention respects; one batched existence check covers them.
HOLD_SLOTS = 32


def hold_key(version: int, slot: int) -> str:
    return f"v{version}.hold.{slot}"


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """A version that is, or may be partly, in the store; `base` is the version its deltas need."""

    version: int
    attempt: str
    buckets: int
    base: int | None = None

    def keys(self) -> list[str]:
        """The manifest first: once that is gone, the version is."""
        return [
            manifest_key(self.version),
            *(bucket_key(self.version, self.attempt, index) for index in range(self.buckets)),
            *(hold_key(self.version, slot) for slot in range(HOLD_SLOTS)),
        ]


class Index(msgspec.Struct, frozen=True):
    """`versions` are ascending; `pending` was begun, and exists if its manifest does."""

    owner: str
    versions: tuple[Entry, ...] = ()
    pending: Entry | None = None

    @property
    def latest(self) -> int | None:
        return self.versions[-1].version if self.versions else None

    def find(self, version: int) -> Entry | None:
        return next((entry for entry in self.versions if entry.version == version), None)

    def without(self, gone: Entry) -> Index:
        return Index(self.owner, tuple(entry for entry in self.versions if entry != gone), self.pending)

    def surplus(self, keep: int) -> Sequence[Entry]:
        """The entries that are neither among the last `keep` nor a base that one of those needs, oldest first."""
        needed: set[int] = set()
        for position, entry in reversed(list(enumerate(self.versions))):
            if len(self.versions) - position <= keep or entry.version in needed:
                needed.add(entry.version)
                if entry.base is not None:
                    needed.add(entry.base)
        return [entry for entry in self.versions if entry.version not in needed]

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Index:
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except msgspec.DecodeError as error:
            raise BadManifest(f"the store's index does not decode: {error}") from error
