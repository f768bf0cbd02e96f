"""What shards of several ranks make together: the wanted parts of tensors, and which of a rank's bytes they lie in.

A tensor that every rank has whole (norms) is taken from the first rank. All of it is pure, so that whoever maps the
staged bytes can put them together, an engine's process as well (`test_weightsync_sharding.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from weightsync.checksum import checksum
from weightsync.dtypes import ITEMSIZE
from weightsync.errors import BadTensor
from weightsync.handover import Ranges, in_leaves
from weightsync.manifest import Plan, TensorMeta
from weightsync.tensors import Bytes, Tensor

__all__ = ["Part", "assembled", "combined", "needed"]


class Part(msgspec.Struct, frozen=True):
    """What a reader wants of a tensor: `[start, stop)` along `dim`."""

    dim: int
    start: int
    stop: int


Parts = Mapping[str, Part]
# Where a box lies in each dimension, in coordinates of the whole tensor.
_Box = tuple[tuple[int, int], ...]


def combined(digests: Sequence[str]) -> str:
    """The identity of a version that ranks published under these digests; of one rank, its own."""
    return digests[0] if len(digests) == 1 else checksum([np.frombuffer("".join(digests).encode(), np.uint8)])


def needed(plan: Plan, parts: Parts, *, first: bool) -> Ranges:
    """What of a rank's buckets holds something wanted; `first` for the first rank."""
    spans = []
    for meta, offset in zip(plan.tensors, plan.offsets, strict=True):
        box = _overlap(meta, parts)
        if box is not None and (meta.shard is not None or first):
            begin, end = _span(meta, box)
            spans.append((offset + begin, offset + end))
    return in_leaves(plan, spans)


def assembled(ranks: Sequence[tuple[Plan, Bytes]], parts: Parts) -> Iterator[Tensor]:
    """The wanted parts, one at a time, from each rank's plan and content. Raises BadTensor where one is missing."""
    sources: dict[str, list[tuple[TensorMeta, Bytes]]] = {}
    for plan, content in ranks:
        for meta, offset in zip(plan.tensors, plan.offsets, strict=True):
            found = sources.setdefault(meta.name, [])
            if meta.shard is not None or not found:
                found.append((meta, content[offset : offset + meta.nbytes]))
    for shards in sources.values():
        yield _assemble(shards, parts)


def _wanted(meta: TensorMeta, parts: Parts) -> _Box:
    whole = [(0, size) for size in meta.shape]
    if meta.shard is not None:
        whole[meta.shard.dim] = (0, meta.shard.size)
    part = parts.get(meta.name)
    if part is not None:
        if not (0 <= part.dim < len(whole) and 0 <= part.start < part.stop <= whole[part.dim][1]):
            raise BadTensor(f"{part} of tensor {meta.name!r} lies outside of it: its sizes are {whole}")
        whole[part.dim] = (part.start, part.stop)
    return tuple(whole)


def _overlap(meta: TensorMeta, parts: Parts) -> _Box | None:
    """What of the tensor's wanted part this rank's shard has; None if nothing."""
    box = tuple(
        (max(want[0], have[0]), min(want[1], have[1]))
        for want, have in zip(_wanted(meta, parts), _own(meta), strict=True)
    )
    return box if all(begin < end for begin, end in box) else None


def _assemble(shards: list[tuple[TensorMeta, Bytes]], parts: Parts) -> Tensor:
    meta, data = shards[0]
    wanted = _wanted(meta, parts)
    if all(_wanted(other, parts) == wanted == _own(other) for other, _ in shards):
        return Tensor(_plain(meta, wanted), data)
    kind = np.dtype((np.void, ITEMSIZE[meta.dtype]))
    out = np.empty([end - begin for begin, end in wanted], kind)
    filled = 0
    for other, content in shards:
        box = _overlap(other, parts)
        if box is not None:
            part = content.view(kind).reshape(other.shape)[_slices(box, _own(other))]
            out[_slices(box, wanted)] = part
            filled += part.size
    if filled != out.size:
        raise BadTensor(f"the shards of {meta.name!r} hold {filled} of its {out.size} wanted elements")
    return Tensor(_plain(meta, wanted), out.reshape(-1).view(np.uint8))


def _own(meta: TensorMeta) -> _Box:
    box = [(0, size) for size in meta.shape]
    if (shard := meta.shard) is not None:
        box[shard.dim] = (shard.start, shard.start + meta.shape[shard.dim])
    return tuple(box)


def _plain(meta: TensorMeta, box: _Box) -> TensorMeta:
    return TensorMeta(meta.name, meta.dtype, tuple(end - begin for begin, end in box))


def _slices(box: _Box, within: _Box) -> tuple[slice, ...]:
    return tuple(slice(b - w, e - w) for (b, e), (w, _) in zip(box, within, strict=True))


def _span(meta: TensorMeta, box: _Box) -> tuple[int, int]:
    """The bytes of the tensor from the first to the last element of the box."""
    strides = [math.prod(meta.shape[dim + 1 :]) for dim in range(len(meta.shape))]
    own = _own(meta)
    first = sum((begin - o) * stride for (begin, _), (o, _), stride in zip(box, own, strides, strict=True))
    last = sum((end - 1 - o) * stride for (_, end), (o, _), stride in zip(box, own, strides, strict=True))
    return first * ITEMSIZE[meta.dtype], (last + 1) * ITEMSIZE[meta.dtype]
