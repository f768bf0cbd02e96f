"""From staged bytes to whoever loads them: proved first, then given by name. Everything here blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from weightsync.checksum import LEAF_BYTES, checksum, leaves, leaves_of
from weightsync.errors import BadConfig, CorruptBucket
from weightsync.manifest import Bucket, Manifest, Plan, TensorMeta
from weightsync.tensors import Bytes, Tensor

__all__ = [
    "Load",
    "Ranges",
    "check_fits",
    "hand_over",
    "in_leaves",
    "is_content",
    "is_published",
    "verify",
    "whole",
]

# May have `check(metas)`, which is asked before anything is loaded and raises if the version does not fit.
Load = Callable[[str, Tensor], None]

# Of each bucket the bytes `[start, stop)` that are wanted, in order, apart, and in whole leaves.
Ranges = dict[int, list[tuple[int, int]]]


def whole(plan: Plan) -> Ranges:
    return {index: [(0, plan.size(index))] for index in range(len(plan))}


def in_leaves(plan: Plan, spans: Sequence[tuple[int, int]]) -> Ranges:
    """The spans of the flat space, widened to leaves; those that touch are one range."""
    wanted: dict[int, Any] = {}
    for start, stop in spans:
        for index in range(start // plan.bucket_bytes, -(-stop // plan.bucket_bytes)):
            first = plan.span(index).start
            here = wanted.setdefault(index, np.zeros(-(-plan.size(index) // LEAF_BYTES) + 1, np.bool_))
            here[max(0, start - first) // LEAF_BYTES : -(-min(plan.size(index), stop - first) // LEAF_BYTES)] = True
    return {index: _ranges(wanted[index], plan.size(index)) for index in sorted(wanted)}


def _ranges(leaves_wanted: Any, size: int) -> list[tuple[int, int]]:
    # The last flag is always off, so that every range ends.
    edges = np.flatnonzero(np.diff(leaves_wanted, prepend=False)).reshape(-1, 2) * LEAF_BYTES
    return [(int(start), min(int(stop), size)) for start, stop in edges]


def check_fits(metas: Sequence[TensorMeta], load: Load) -> None:
    """Before anything is loaded: whether `load` can be called, and says that these tensors fit."""
    if not callable(load):
        raise BadConfig(f"load is {load!r}; give a function of a tensor's name and the tensor")
    check = getattr(load, "check", None)
    if check is not None:
        check(metas)


def hand_over(plan: Plan, content: Bytes, load: Load) -> None:
    for tensor in _tensors(plan, content):
        load(tensor.meta.name, tensor)


def verify(manifest: Manifest, plan: Plan, content: Bytes, ranges: Ranges) -> None:
    """Raise CorruptBucket unless these ranges of `content` are what was published."""
    for index, wanted in ranges.items():
        if not is_content(manifest.buckets[index], content[plan.span(index)], wanted):
            raise CorruptBucket(f"staged bucket {index} of version {manifest.version} has changed: prefetch it again")


def is_content(bucket: Bucket, flat: Bytes, ranges: list[tuple[int, int]]) -> bool:
    """Whether these ranges of the bucket's flat bytes are its published content."""
    return all(leaves([flat[start:stop]]) == leaves_of(bucket.leaves, start, stop) for start, stop in ranges)


def is_published(bucket: Bucket, start: int, data: Bytes) -> bool:
    """Whether these are the bytes from `start` on of the bucket's object."""
    if bucket.delta:
        return checksum([data]) == bucket.wire_digest
    return leaves([data]) == leaves_of(bucket.leaves, start, start + data.size)


def _tensors(plan: Plan, content: Bytes) -> Iterator[Tensor]:
    for meta, offset in zip(plan.tensors, plan.offsets, strict=True):
        yield Tensor(meta, content[offset : offset + meta.nbytes])
