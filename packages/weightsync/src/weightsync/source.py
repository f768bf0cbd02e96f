"""The tensors of one publication as the buckets of their plan: bytes, checksums, and what is sent for each.

Buckets are lists of views wherever tensors allow it; stores write the views one after the other. Everything here
blocks, and runs in threads, two buckets at a time.
"""

from __future__ import annotations

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

    def parts(self, index: int) -> list[Bytes]:
        """The bucket's bytes in order, padding included; views wherever a tensor allows it."""
        parts, end = [], 0
        for number, start, stop, offset in self._pieces[index]:
            if offset > end:
                parts.append(_PADDING[: offset - end])
            parts.append(piece(self.plan.tensors[number].name, self._tensors[number], start, stop))
            end = offset + stop - start
        parts.append(_PADDING[: self.plan.size(index) - end])
        return parts

    def digest(self, index: int) -> str:
        return checksum(self.parts(index))

    def encode(self, index: int, content: Bytes | None, on_base: bool) -> Encoded:
        """The bucket as it is sent. `content` is the snapshot: on return, it holds this version's bytes."""
        parts = self.parts(index)
        if content is None:
            return self._whole(index, parts)
        if not on_base:
            _fill(content, parts)
            return self._whole(index, parts)
        payload, changed = delta.encode(self.plan.runs()[index], content, self._flat(index, parts))
        if payload is None:
            return msgspec.structs.replace(self._whole(index, [content]), changed=changed)
        wire = np.frombuffer(payload, np.uint8)
        bucket = Bucket(checksum([content]), wire.size, checksum([wire]) if wire.size else "", True)
        return Encoded(bucket, [wire], changed)

    def _whole(self, index: int, parts: list[Bytes]) -> Encoded:
        digest = checksum(parts)
        return Encoded(Bucket(digest, self.plan.size(index), digest), parts, 0)

    def _flat(self, index: int, parts: list[Bytes]) -> Bytes:
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _fill(content: Bytes, parts: list[Bytes]) -> None:
    end = 0
    for part in parts:
        content[end : end + part.size] = part
        end += part.size
