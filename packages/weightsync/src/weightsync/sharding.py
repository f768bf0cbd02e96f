"""Tensor-parallel trainers and readers of different degrees.

Each trainer rank publishes its own shards to its own store (`publish(..., shards={name: Shard(dim, start, size)})`);
each reader says which part of each tensor it wants, fetches only the byte ranges that hold it (in whole leaves, see
`checksum`), and is given its parts put together. A version is there when every rank has published it
(`test_weightsync_sharding.py`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack

import msgspec
import numpy as np

from weightsync.blocking import each, in_thread
from weightsync.checksum import checksum
from weightsync.dtypes import ITEMSIZE
from weightsync.errors import BadTensor
from weightsync.handover import Load, Ranges, in_leaves, verify
from weightsync.manifest import Plan, TensorMeta
from weightsync.store import Store
from weightsync.subscriber import Commit, Staged, Subscriber
from weightsync.tensors import Bytes, Tensor

__all__ = ["Part", "ShardedSubscriber"]


class Part(msgspec.Struct, frozen=True):
    """What a reader wants of a tensor: `[start, stop)` along `dim`."""

    dim: int
    start: int
    stop: int


# Where a box lies in each dimension, in coordinates of the whole tensor.
_Box = tuple[tuple[int, int], ...]


class ShardedSubscriber:
    """Reads one version from the stores of all trainer ranks.

    `parts` names what is wanted of which tensor; a tensor that is not named is wanted whole. Tensors that every rank
    has whole (norms) are taken from the first.
    """

    def __init__(self, stores: Sequence[Store], parts: Mapping[str, Part], *, timeout: float = 3600.0) -> None:
        self._parts = parts
        self._subscribers = [
            Subscriber(store, timeout=timeout, needs=self._needs(first=not number))
            for number, store in enumerate(stores)
        ]

    async def prefetch(self, version: int, timeout: float | None = None) -> list[Staged]:
        found: dict[int, Staged] = {}

        async def pull(number: int) -> None:
            found[number] = await self._subscribers[number].prefetch(version, timeout)

        await each(len(self._subscribers), range(len(self._subscribers)), pull)
        return [found[number] for number in sorted(found)]

    async def commit(self, staged: Sequence[Staged], load: Load) -> Commit:
        """Hand each wanted part to `load`; the digest is over the names and bytes that it was given."""
        start = asyncio.get_running_loop().time()
        digests: list[str] = []
        count = size = 0

        def assemble() -> None:
            nonlocal count, size
            for one in staged:
                verify(one.manifest, one.plan, one.staging.array, one.ranges)
            for tensor in self._assembled(staged):
                load(tensor.meta.name, tensor)
                identity = np.frombuffer(msgspec.msgpack.encode(tensor.meta), np.uint8)
                digests.append(checksum([identity, tensor.data]))
                count, size = count + 1, size + tensor.data.size

        async with AsyncExitStack() as stack:
            for subscriber, one in zip(self._subscribers, staged, strict=True):
                await stack.enter_async_context(subscriber.using(one))
            await in_thread(assemble)
        took = asyncio.get_running_loop().time() - start
        digest = checksum([np.frombuffer("".join(digests).encode(), np.uint8)])
        return Commit(staged[0].version, digest, took, size, count)

    async def close(self) -> None:
        for subscriber in self._subscribers:
            await subscriber.close()

    def _needs(self, *, first: bool) -> Callable[[Plan], Ranges]:
        """What of a rank's buckets holds something wanted."""

        def needs(plan: Plan) -> Ranges:
            spans = []
            for meta, offset in zip(plan.tensors, plan.offsets, strict=True):
                box = self._overlap(meta)
                if box is not None and (meta.shard is not None or first):
                    begin, end = _span(meta, box)
                    spans.append((offset + begin, offset + end))
            return in_leaves(plan, spans)

        return needs

    def _wanted(self, meta: TensorMeta) -> _Box:
        whole = [(0, size) for size in meta.shape]
        if meta.shard is not None:
            whole[meta.shard.dim] = (0, meta.shard.size)
        part = self._parts.get(meta.name)
        if part is not None:
            if not (0 <= part.dim < len(whole) and 0 <= part.start < part.stop <= whole[part.dim][1]):
                raise BadTensor(f"{part} of tensor {meta.name!r} lies outside of it: its sizes are {whole}")
            whole[part.dim] = (part.start, part.stop)
        return tuple(whole)

    def _overlap(self, meta: TensorMeta) -> _Box | None:
        """What of the tensor's wanted part this rank's shard has; None if nothing."""
        box = tuple(
            (max(want[0], have[0]), min(want[1], have[1]))
            for want, have in zip(self._wanted(meta), _own(meta), strict=True)
        )
        return box if all(begin < end for begin, end in box) else None

    def _assembled(self, staged: Sequence[Staged]) -> Iterator[Tensor]:
        sources: dict[str, list[tuple[TensorMeta, Bytes]]] = {}
        for one in staged:
            for meta, offset in zip(one.plan.tensors, one.plan.offsets, strict=True):
                found = sources.setdefault(meta.name, [])
                if meta.shard is not None or not found:
                    found.append((meta, one.staging.array[offset : offset + meta.nbytes]))
        for shards in sources.values():
            yield self._assemble(shards)

    def _assemble(self, shards: list[tuple[TensorMeta, Bytes]]) -> Tensor:
        meta, data = shards[0]
        wanted = self._wanted(meta)
        if all(self._wanted(other) == wanted == _own(other) for other, _ in shards):
            return Tensor(_plain(meta, wanted), data)
        kind = np.dtype((np.void, ITEMSIZE[meta.dtype]))
        out = np.empty([end - begin for begin, end in wanted], kind)
        filled = 0
        for other, content in shards:
            box = self._overlap(other)
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
