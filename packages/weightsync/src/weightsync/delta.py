"""Deltas: the positions and new values of the elements whose bits changed, one payload a bucket.

Values overwrite, so applying a delta twice is the same as once; that the base was right is proved by the bucket's
content checksum afterwards (`test_weightsync_delta.py`). Positions are gaps to the previous change, written in
digits of one, two or four bytes: the largest digit says "that far, and go on", any other ends the gap.
At 1 % density a gap costs 1.08 bytes, where the entropy is 1.01.

A bucket is worked through in pieces, so that neither side holds much more than the payload
(`test_weightsync_memory.py`).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from weightsync.errors import CorruptBucket
from weightsync.tensors import Bytes

__all__ = ["apply", "encode"]

Words = npt.NDArray[Any]
Positions = npt.NDArray[np.int64]
Count = Annotated[int, msgspec.Meta(ge=0)]

# Above half of the bucket a delta saves little and costs its reader more than a copy.
_WORTHWHILE = 0.5
# Elements compared at a time: two inputs, the mask and what is found stay in the second-level cache.
_COMPARED = 1 << 16
# Changes in a block: enough that its overhead does not count, few enough that its positions, at eight bytes, do not.
_BLOCK = 1 << 15
# Compression is tried on this much of a stream, and used if it saves at least a tenth.
_SAMPLE_BYTES = 1 << 16
# The types of a digit, and the largest value of each, which says that the gap goes on.
_DIGITS: tuple[tuple[Any, int], ...] = ((np.uint8, 0xFF), (np.uint16, 0xFFFF), (np.uint32, 0xFFFFFFFF))
_LENGTH_BYTES = 4


class _Block(msgspec.Struct, array_like=True):
    """Changes of one run: where its first one is, how many, and how many digits of which type tell where the rest."""

    run: Count
    start: Count
    count: Count
    digit: Annotated[int, msgspec.Meta(ge=0, lt=len(_DIGITS))]
    digits: Count


class _Stream(msgspec.Struct, array_like=True):
    """Bytes on the wire, and whether they are compressed."""

    size: Count
    compressed: bool


class _Header(msgspec.Struct, array_like=True):
    """Stands before the two streams; in them is what belongs to each block in turn."""

    blocks: list[_Block]
    gaps: _Stream
    values: _Stream


class _Encoder:
    """Collects the changes of a bucket, until they are more than a delta is worth."""

    def __init__(self, limit: float) -> None:
        self.changed = 0
        self.worthwhile = True
        self._limit = limit
        self._size = 0
        self._found: list[tuple[Positions, Words]] = []
        self._pending = 0
        self._blocks: list[_Block] = []
        self._gaps: list[bytes] = []
        self._values: list[bytes] = []

    def add(self, run: int, positions: Positions, values: Words) -> None:
        self._found.append((positions, values))
        self._pending += positions.size
        if self._pending >= _BLOCK:
            self.flush(run)

    def flush(self, run: int) -> None:
        """End the block, and with it the run or a part of it."""
        if not self._pending:
            return
        positions, values = (np.concatenate(each) for each in zip(*self._found, strict=True))
        self._found, self._pending = [], 0
        start = int(positions[0])
        digit, digits = _digits(np.diff(positions, prepend=start - 1) - 1)
        self._blocks.append(_Block(run, start, positions.size, digit, digits.size))
        self._gaps.append(digits.tobytes())
        self._values.append(values.view(np.uint8).reshape(values.size, -1).T.tobytes())

    def count(self, changes: int, width: int) -> bool:
        """Whether it is still worthwhile with these changes; if not, what was collected is dropped."""
        self.changed += changes
        self._size += changes * (width + 1)
        if self._size > self._limit:
            self.worthwhile, self._found, self._pending = False, [], 0
            for each in (self._blocks, self._gaps, self._values):
                each.clear()
        return self.worthwhile

    def payload(self) -> list[Bytes]:
        (gaps, where), (values, what) = (_packed(each) for each in (self._gaps, self._values))
        header = msgspec.msgpack.encode(_Header(self._blocks, gaps, values))
        parts = [len(header).to_bytes(_LENGTH_BYTES, "little") + header, *where, *what]
        return [np.frombuffer(part, np.uint8) for part in parts]


def encode(
    runs: Sequence[tuple[int, int]], old: Bytes, read: Callable[[int, int], Bytes]
) -> tuple[list[Bytes] | None, int]:
    """The payload that makes `old` the new content (None if it is not worth it, empty if nothing changed), its count.

    `read(start, stop)` is the new content, asked for in order. On return `old` holds it.
    """
    encoder = _Encoder(_WORTHWHILE * old.size)
    mask = np.zeros(_COMPARED, np.bool_)
    begin = 0
    for run, (width, size) in enumerate(runs):
        for start in range(begin, begin + size, _COMPARED * width):
            stop = min(start + _COMPARED * width, begin + size)
            before, after = (side.view(f"u{width}") for side in (old[start:stop], read(start, stop)))
            changes = _compare(before, after, mask)
            if not changes:
                continue
            if not encoder.count(changes, width):
                before[:] = after
                continue
            positions = _positions(mask, changes)
            values = after[positions]
            before[positions] = values
            encoder.add(run, positions + (start - begin) // width, values)
        encoder.flush(run)
        begin += size
    if not encoder.changed:
        return [], 0
    return (encoder.payload() if encoder.worthwhile else None), encoder.changed


def apply(runs: Sequence[tuple[int, int]], content: Bytes, payload: Bytes) -> None:
    """Overwrite what changed in `content`, which holds the base's bytes."""
    try:
        _apply(_words(runs, content), payload)
    except (msgspec.MsgspecError, zlib.error, ValueError, IndexError) as error:
        raise CorruptBucket(f"a delta does not decode: {error}") from error


def _apply(runs: list[Words], payload: Bytes) -> None:
    length = _LENGTH_BYTES + int.from_bytes(payload[:_LENGTH_BYTES].tobytes(), "little")
    header = msgspec.msgpack.decode(payload[_LENGTH_BYTES:length].data, type=_Header)
    between, end = length + header.gaps.size, length + header.gaps.size + header.values.size
    if end != payload.size:
        raise ValueError(f"{payload.size} bytes, not {end}")
    gaps, values = _unpacked(header.gaps, payload[length:between]), _unpacked(header.values, payload[between:end])
    for block in header.blocks:
        kind, largest = _DIGITS[block.digit]
        size = block.digits * np.dtype(kind).itemsize
        digits, gaps = gaps[:size].view(kind), gaps[size:]
        words = runs[block.run][block.start :]
        width = words.itemsize
        planes, values = values[: block.count * width].reshape(width, block.count), values[block.count * width :]
        positions = np.cumsum(digits, dtype=np.int64)[digits != largest]
        if positions.size != block.count:
            raise ValueError(f"{positions.size} positions for {block.count} values")
        positions += np.arange(block.count)
        words[positions] = np.ascontiguousarray(planes.T).view(words.dtype)[:, 0]


def _words(runs: Sequence[tuple[int, int]], content: Bytes) -> list[Words]:
    """The runs of equally wide elements that the bucket is made of."""
    ends = list(accumulate(size for _, size in runs))
    return [content[end - size : end].view(f"u{width}") for (width, size), end in zip(runs, ends, strict=True)]


def _compare(before: Words, after: Words, mask: npt.NDArray[np.bool_]) -> int:
    """Flag unequal words in `mask`, and count them."""
    np.not_equal(before, after, out=mask[: before.size])
    mask[before.size :] = False
    return int(np.count_nonzero(mask))


def _positions(mask: npt.NDArray[np.bool_], count: int) -> Positions:
    """Of the flags that are on. Of few, eight at a time: most groups are off and cost one comparison."""
    if 8 * count > mask.size:
        return np.flatnonzero(mask)
    groups = np.flatnonzero(mask.view(np.uint64) != 0)
    within = np.flatnonzero(mask.reshape(-1, 8)[groups])
    return groups[within >> 3] * 8 + (within & 7)


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


def _packed(streams: list[bytes]) -> tuple[_Stream, list[bytes]]:
    sample = streams[0][:_SAMPLE_BYTES]
    compressed = len(zlib.compress(sample, 1)) <= 0.9 * len(sample)
    if compressed:
        packer = zlib.compressobj(1)
        packed = [packer.compress(each) for each in streams]
        streams = [each for each in (*packed, packer.flush()) if each]
    return _Stream(sum(map(len, streams)), compressed), streams


def _unpacked(stream: _Stream, data: Bytes) -> Bytes:
    return np.frombuffer(zlib.decompress(data.data), np.uint8) if stream.compressed else data
