"""What shards of several ranks make together: the wanted parts of tensors, and which of a rank's bytes they lie in.

A tensor that every rank has whole (norms) is taken from the first rank; shards may repeat, but not overlap. All of it
is pure, so that whoever maps the staged bytes can put them together, an engine's process as well
(`test_weightsync_sharding.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import msgspec
import numpy as np

from weightsync.checksum import checksum
from weightsync.dtypes import ITEMSIZE
from weightsync.errors import BadTensor
from weightsync.handover import Ranges, in_leaves
from weightsync.manifest import Plan, TensorMeta
from weightsync.tensors import Bytes, Tensor

__all__ = ["Part", "assembled", "combined", "described", "needed"]


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


def described(plans: Sequence[Plan], parts: Parts) -> list[TensorMeta]:
    """What `assembled` will give. Raises BadTensor where the ranks disagree, or none has what is wanted."""
    firsts: dict[str, TensorMeta] = {}
    for number, plan in enumerate(plans):
        for meta in plan.tensors:
            if number and meta.shard is None and meta.name not in firsts:
                raise BadTensor(
                    f"only rank {number} has tensor {meta.name!r}, and whole ones are taken from rank 0: "
                    "publish it with Shard(0, 0, its first size)"
                )
            first = firsts.setdefault(meta.name, meta)
            if (meta.dtype, _wanted(meta, parts)) != (first.dtype, _wanted(first, parts)):
                raise BadTensor(f"the ranks disagree on tensor {meta.name!r}: {first}, and on rank {number} {meta}")
    for name in sorted(parts.keys() - firsts.keys()):
        raise BadTensor(f"a part of tensor {name!r} is wanted, which no rank publishes")
    return [_plain(meta, _wanted(meta, parts)) for meta in firsts.values()]


def assembled(ranks: Sequence[tuple[Plan, Bytes]], parts: Parts) -> Iterator[Tensor]:
    """The wanted parts, one at a time, from each rank's plan and content. Raises BadTensor where one is missing."""
    sources: dict[str, list[tuple[TensorMeta, Bytes]]] = {}
    for plan, content in ranks:
        for meta, offset in zip(plan.tensors, plan.offsets, strict=True):
            found = sources.setdefault(meta.name, [])
            if meta.shard is not None or not found:
                found.append((meta, content[offset : offset + meta.nbytes]))
    described([plan for plan, _ in ranks], parts)
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
    if all(_own(other) == wanted for other, _ in shards):
        return Tensor(_plain(meta, wanted), data)
    kind = np.dtype((np.void, ITEMSIZE[meta.dtype]))
    out = np.empty([end - begin for begin, end in wanted], kind)
    pieces = {box: shard for shard in shards if (box := _overlap(shard[0], parts)) is not None}
    for one, other in pairwise(sorted(pieces)):
        if all(begin < stop and start < end for (begin, end), (start, stop) in zip(one, other, strict=True)):
            raise BadTensor(f"two shards of {meta.name!r} overlap: {one} and {other} of {wanted}")
    filled = 0
    for box, (shard, content) in pieces.items():
        part = content.view(kind).reshape(shard.shape)[_slices(box, _own(shard))]
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
