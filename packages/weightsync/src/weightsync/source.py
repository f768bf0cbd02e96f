"""The tensors of one publication as the buckets of their plan: bytes, checksums, and what is sent for each.

Buckets are lists of views wherever tensors allow it; stores write the views one after the other. Everything here
blocks, and runs in threads, two buckets at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from weightsync import delta
from weightsync.checksum import checksum
from weightsync.manifest import ALIGNMENT, Bucket, Plan
from weightsync.tensors import Bytes, piece

__all__ = ["Encoded", "Source"]

_PADDING = np.zeros(ALIGNMENT, np.uint8)


class Encoded(msgspec.Struct):
    """A bucket, the bytes to send for it, and how many of its elements changed."""

    bucket: Bucket
    parts: list[Bytes]
    changed: int


class Source:
    """The tensors of one publication under a plan."""

    def __init__(self, plan: Plan, tensors: list[Any]) -> None:
        self.plan = plan
        self._tensors = tensors
        self._pieces = list(plan.pieces())
        self._runs = plan.runs()

    def digest(self, index: int) -> str:
        return checksum(list(self._parts(index)))

    def encode(self, index: int, snapshot: Bytes | None, on_base: bool) -> Encoded:
        """The bucket as it is sent. On return, the snapshot of the bucket, if there is one, is of this version."""
        if snapshot is None:
            return self._whole(index, list(self._parts(index)))
        if not on_base:
            self._fill(index, snapshot)
            return self._whole(index, [snapshot])
        payload, changed = delta.encode(self._runs[index], snapshot, self._flat(index))
        if payload is None:
            return msgspec.structs.replace(self._whole(index, [snapshot]), changed=changed)
        wire = np.frombuffer(payload, np.uint8)
        bucket = Bucket(checksum([snapshot]), wire.size, checksum([wire]) if wire.size else "", True)
        return Encoded(bucket, [wire], changed)

    def _parts(self, index: int) -> Iterator[Bytes]:
        """The bucket's bytes in order, padding included; views wherever a tensor allows it."""
        end = 0
        for number, start, stop, offset in self._pieces[index]:
            if offset > end:
                yield _PADDING[: offset - end]
            yield piece(self.plan.tensors[number].name, self._tensors[number], start, stop)
            end = offset + stop - start
        if end < self.plan.size(index):
            yield _PADDING[: self.plan.size(index) - end]

    def _whole(self, index: int, parts: list[Bytes]) -> Encoded:
        digest = checksum(parts)
        return Encoded(Bucket(digest, self.plan.size(index), digest), parts, 0)

    def _flat(self, index: int) -> Bytes:
        if len(self._pieces[index]) == 1 and (first := next(self._parts(index))).size == self.plan.size(index):
            return first
        flat = np.empty(self.plan.size(index), np.uint8)
        self._fill(index, flat)
        return flat

    def _fill(self, index: int, flat: Bytes) -> None:
        end = 0
        for part in self._parts(index):
            flat[end : end + part.size] = part
            end += part.size
