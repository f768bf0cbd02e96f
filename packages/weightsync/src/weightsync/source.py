"""The tensors of one publication as the buckets of their plan: bytes, checksums, and what is sent for each.

A bucket is a list of views if all its tensors allow it, and a copy otherwise: stores write the views one after the
other. Everything here blocks, and runs in threads, two buckets at a time. Beyond its bucket a call holds one block
(`test_weightsync_memory.py`).
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from typing import Any

import msgspec
import numpy as np

from weightsync import delta
from weightsync.checksum import checksum, leaves, root
from weightsync.manifest import ALIGNMENT, Bucket, Piece, Plan
from weightsync.tensors import Bytes, fill, raw

__all__ = ["Encoded", "Source"]

_PADDING = np.zeros(ALIGNMENT, np.uint8)


class Encoded(msgspec.Struct):
    """A bucket, the bytes to send for it, and how many of its elements changed."""

    bucket: Bucket
    parts: list[Bytes]
    changed: int = 0
    copy: Bytes | None = None


class Source:
    """The tensors of one publication under a plan."""

    def __init__(self, plan: Plan, tensors: list[Any]) -> None:
        self.plan = plan
        self._tensors = tensors
        self._raw = [raw(tensor) for tensor in tensors]
        self._free: list[Bytes] = []

    def digest(self, index: int) -> str:
        encoded = self.encode(index, None, False)
        self.give_back(encoded)
        return encoded.bucket.digest

    def give_back(self, encoded: Encoded) -> None:
        """It is sent: the memory of its copy, if it is one, serves for another bucket."""
        if encoded.copy is not None:
            self._free.append(encoded.copy)

    def encode(self, index: int, snapshot: Bytes | None, on_base: bool) -> Encoded:
        """The bucket as it is sent. On return, the snapshot of the bucket, if there is one, is of this version."""
        if snapshot is None:
            parts = self._views(index)
            if parts is not None:
                return self._whole(index, parts)
            copy = self._free.pop() if self._free else _pages(self.plan.size(0))
            flat = copy[: self.plan.size(index)]
            self._gather(index, 0, flat)
            return msgspec.structs.replace(self._whole(index, [flat]), copy=copy)
        if not on_base:
            self._gather(index, 0, snapshot)
            return self._whole(index, [snapshot])
        window = _Window(self, index)
        parts, changed = delta.encode(self.plan.runs()[index], snapshot, window.read)
        if parts is None:
            return msgspec.structs.replace(self._whole(index, [snapshot]), changed=changed)
        size, content = sum(part.size for part in parts), leaves([snapshot])
        bucket = Bucket(root(content), size, checksum(parts) if parts else "", True, content)
        return Encoded(bucket, parts, changed)

    def _whole(self, index: int, parts: list[Bytes]) -> Encoded:
        content = leaves(parts)
        digest = root(content)
        return Encoded(Bucket(digest, self.plan.size(index), digest, False, content), parts)

    def _views(self, index: int) -> list[Bytes] | None:
        """The bucket's bytes in order, padding included; None if one of its tensors must be copied."""
        parts, end = [], 0
        for number, start, stop, offset in self.plan.pieces()[index]:
            whole = self._raw[number]
            if whole is None:
                return None
            if offset > end:
                parts.append(_PADDING[: offset - end])
            parts.append(whole[start:stop])
            end = offset + stop - start
        if end < self.plan.size(index):
            parts.append(_PADDING[: self.plan.size(index) - end])
        return parts

    def _gather(self, index: int, start: int, out: Bytes) -> None:
        """Write the bucket's bytes from `start` on, padding included, into `out`."""
        end = start
        for number, begin, offset, size in _within(self.plan.pieces()[index], start, start + out.size):
            out[end - start : offset - start] = 0
            end = offset + size
            fill(self._tensors[number], begin, begin + size, out[offset - start : end - start])
        out[end - start :] = 0

    def _view(self, index: int, start: int, stop: int) -> Bytes | None:
        """The bytes `[start, stop)` of the bucket if they lie in one tensor that needs no copy."""
        found = _within(self.plan.pieces()[index], start, stop)
        number, begin, _, size = found[0]
        whole = self._raw[number]
        return whole[begin : begin + size] if whole is not None and size == stop - start else None


def _pages(size: int) -> Bytes:
    """Memory that is given back to the system when it is dropped, which malloc does not promise."""
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


class _Window:
    """Reads a bucket block by block: what `read` returns is valid until it is called again."""

    def __init__(self, source: Source, index: int) -> None:
        self._source = source
        self._index = index
        self._block = np.empty(0, np.uint8)

    def read(self, start: int, stop: int) -> Bytes:
        view = self._source._view(self._index, start, stop)
        if view is not None:
            return view
        if self._block.size < stop - start:
            self._block = np.empty(stop - start, np.uint8)
        block = self._block[: stop - start]
        self._source._gather(self._index, start, block)
        return block


def _within(pieces: list[Piece], start: int, stop: int) -> list[tuple[int, int, int, int]]:
    """What of the pieces lies in bytes `[start, stop)` of their bucket: tensor, start in it, offset, size."""
    found = []
    first = bisect_right(pieces, start, key=lambda piece: piece.offset) - 1
    for number, begin, end, offset in pieces[max(first, 0) :]:
        if offset >= stop:
            break
        skip = max(0, start - offset)
        size = min(end - begin, stop - offset) - skip
        if size > 0:
            found.append((number, begin + skip, offset + skip, size))
    return found
