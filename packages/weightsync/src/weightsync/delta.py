"""Deltas: the positions and new values of the elements whose bits changed, one payload a bucket.

Values overwrite, so applying a delta twice is the same as once; that the base was right is proved by the bucket's
content checksum afterwards (`test_weightsync_delta.py`). Positions are gaps to the previous change, written in
digits of one, two or four bytes: the largest digit says "that far, and go on", any other ends the gap.
At 1 % density a gap costs 1.08 bytes, where the entropy is 1.01.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from weightsync.errors import CorruptBucket
from weightsync.tensors import Bytes

__all__ = ["apply", "encode"]

Words = npt.NDArray[Any]

# Above half of the bucket a delta saves little and costs its reader more than a copy.
_WORTHWHILE = 0.5
# Compared at a time: two inputs and the mask stay in the second-level cache.
_BLOCK_BYTES = 1 << 18
# Compression is tried on this much of a stream, and used if it saves at least a tenth.
_SAMPLE_BYTES = 1 << 16
# The types of a digit, and the largest value of each, which says that the gap goes on.
_DIGITS: tuple[tuple[Any, int], ...] = ((np.uint8, 0xFF), (np.uint16, 0xFFFF), (np.uint32, 0xFFFFFFFF))


class _Run(msgspec.Struct, array_like=True):
    """The changes in one stretch of equally wide elements; a flag tells whether a stream is compressed."""

    count: int
    digit: int
    gaps: tuple[bool, bytes]
    values: tuple[bool, bytes]


def encode(runs: Sequence[tuple[int, int]], old: Bytes, new: Bytes) -> tuple[bytes | None, int]:
    """The payload that makes `old` into `new` (None if it is not worth it, empty if nothing changed) and its count.

    On return `old` holds the bytes of `new`.
    """
    found: list[tuple[npt.NDArray[np.int64], Words]] = []
    start = 0
    for width, size in runs:
        words = np.dtype(f"u{width}")
        before, after = (side[start : start + size].view(words) for side in (old, new))
        positions = _changed(before, after)
        values = after[positions]
        before[positions] = values
        found.append((positions, values))
        start += size
    changed = sum(positions.size for positions, _ in found)
    if not changed:
        return b"", 0
    if sum(values.nbytes + positions.size for positions, values in found) > _WORTHWHILE * new.size:
        return None, changed
    return msgspec.msgpack.encode([_run(positions, values) for positions, values in found]), changed


def apply(runs: Sequence[tuple[int, int]], content: Bytes, payload: Bytes) -> None:
    """Overwrite what changed in `content`, which holds the base's bytes."""
    try:
        changes = msgspec.msgpack.decode(payload.data, type=list[_Run])
        if len(changes) != len(runs):
            raise CorruptBucket(f"a delta of {len(changes)} runs for a bucket of {len(runs)}")
        start = 0
        for (width, size), change in zip(runs, changes, strict=True):
            _overwrite(content[start : start + size].view(f"u{width}"), change)
            start += size
    except (msgspec.DecodeError, zlib.error, ValueError, IndexError) as error:
        raise CorruptBucket(f"a delta does not decode: {error}") from error


def _changed(before: Words, after: Words) -> npt.NDArray[np.int64]:
    """Positions of unequal words. Eight flags at a time: most groups of eight are equal and cost one comparison."""
    block = _BLOCK_BYTES // before.itemsize
    mask = np.zeros(-(-block // 8) * 8, np.bool_)
    found = []
    for first in range(0, before.size, block):
        size = min(block, before.size - first)
        np.not_equal(before[first : first + size], after[first : first + size], out=mask[:size])
        mask[size:] = False
        groups = np.flatnonzero(mask.view(np.uint64) != 0)
        within = np.flatnonzero(mask.reshape(-1, 8)[groups])
        found.append(groups[within >> 3] * 8 + (within & 7) + first)
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def _run(positions: npt.NDArray[np.int64], values: Words) -> _Run:
    digit, stream = _digits(np.diff(positions, prepend=-1) - 1)
    planes = values.view(np.uint8).reshape(-1, values.itemsize).T
    return _Run(positions.size, digit, _packed(stream.tobytes()), _packed(planes.tobytes()))


def _digits(gaps: npt.NDArray[np.int64]) -> tuple[int, Words]:
    """The shortest of the streams by width of digit, narrowest first until a wider one could not be shorter."""
    best = 0
    streams: list[Words] = []
    for digit, (kind, largest) in enumerate(_DIGITS):
        if streams and streams[best].nbytes <= np.dtype(kind).itemsize * gaps.size:
            break
        more = gaps // largest
        ends = np.cumsum(more + 1)
        stream = np.full(ends[-1] if gaps.size else 0, largest, kind)
        stream[ends - 1] = gaps - more * largest
        streams.append(stream)
        best = min(best, digit, key=lambda each: streams[each].nbytes)
    return best, streams[best]


def _overwrite(content: Words, change: _Run) -> None:
    kind, largest = _DIGITS[change.digit]
    stream = np.frombuffer(_unpacked(change.gaps), kind)
    positions = np.cumsum(stream, dtype=np.int64)[stream != largest] + np.arange(change.count)
    planes = np.frombuffer(_unpacked(change.values), np.uint8).reshape(content.itemsize, change.count)
    content[positions] = np.ascontiguousarray(planes.T).view(content.dtype)[:, 0]


def _packed(stream: bytes) -> tuple[bool, bytes]:
    sample = stream[:_SAMPLE_BYTES]
    if len(zlib.compress(sample, 1)) > 0.9 * len(sample):
        return False, stream
    return True, zlib.compress(stream, 1)


def _unpacked(stream: tuple[bool, bytes]) -> bytes:
    compressed, data = stream
    return zlib.decompress(data) if compressed else data
