"""Shards of one degree of tensor parallelism arrive as parts of another, byte for byte."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync import (
    BadTensor,
    CorruptBucket,
    LayoutChanged,
    Load,
    MemoryStore,
    Part,
    Publisher,
    Shard,
    ShardedSubscriber,
    Subscriber,
    Tensor,
    VersionTimeout,
)

RNG = np.random.default_rng(0)
# Name, shape, and the dimension that is split, as in a transformer.
MODEL: dict[str, tuple[tuple[int, ...], int | None]] = {
    "q": ((32, 24), 0),
    "o": ((24, 32), 1),
    "norm": ((24,), None),
    "experts": ((3, 16, 5), 1),
    "scale": ((), None),
}


def weights(dtype: type = np.float16) -> dict[str, np.ndarray]:
    return {name: np.array(RNG.standard_normal(shape), dtype) for name, (shape, _) in MODEL.items()}


def cut(array: np.ndarray, dim: int | None, rank: int, degree: int) -> tuple[np.ndarray, tuple[int, int] | None]:
    if dim is None:
        return array, None
    step = array.shape[dim] // degree
    index = [slice(None)] * array.ndim
    index[dim] = slice(rank * step, (rank + 1) * step)
    return array[tuple(index)], (rank * step, (rank + 1) * step)


async def publish(publishers: list[Publisher], version: int, full: dict[str, np.ndarray]) -> None:
    for rank, publisher in enumerate(publishers):
        tensors, shards = {}, {}
        for name, (shape, dim) in MODEL.items():
            tensors[name], span = cut(full[name], dim, rank, len(publishers))
            if dim is not None and span is not None:
                shards[name] = Shard(dim, span[0], shape[dim])
        await publisher.publish(version, tensors, shards)


def parts(rank: int, degree: int) -> dict[str, Part]:
    found = {}
    for name, (shape, dim) in MODEL.items():
        if dim is not None:
            step = shape[dim] // degree
            found[name] = Part(dim, rank * step, (rank + 1) * step)
    return found


def keep(found: dict[str, np.ndarray]) -> Load:
    def load(name: str, tensor: Tensor) -> None:
        found[name] = tensor.numpy().copy()

    return load


async def check(trainers: int, readers: int, bucket_bytes: int) -> None:
    stores = [MemoryStore() for _ in range(trainers)]
    publishers = [Publisher(store, bucket_bytes=bucket_bytes, encoding="delta") for store in stores]
    subscribers = [ShardedSubscriber(stores, parts(rank, readers)) for rank in range(readers)]
    for version in range(3):
        full = weights()
        await publish(publishers, version, full)
        for rank, subscriber in enumerate(subscribers):
            found: dict[str, np.ndarray] = {}
            report = await subscriber.commit(await subscriber.prefetch(version), keep(found))
            assert report.version == version and report.tensors == len(MODEL)
            for name, (_, dim) in MODEL.items():
                expected = cut(full[name], dim, rank, readers)[0]
                assert found[name].shape == expected.shape
                assert found[name].tobytes() == np.ascontiguousarray(expected).tobytes(), name
    for subscriber in subscribers:
        await subscriber.close()


@pytest.mark.parametrize(("trainers", "readers"), [(4, 2), (2, 4), (1, 2), (2, 1), (2, 2)])
async def test_degrees_of_tensor_parallelism(trainers: int, readers: int) -> None:
    await check(trainers, readers, 128)


@settings(max_examples=15, deadline=None)
@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.integers(1, 20))
async def test_any_degrees_and_bucket_size(trainers: int, readers: int, blocks: int) -> None:
    await check(trainers, readers, 64 * blocks)


async def test_readers_fetch_only_the_buckets_they_need() -> None:
    store = MemoryStore()
    array = np.arange(1024, dtype=np.float32).reshape(64, 16)
    await Publisher(store, bucket_bytes=256).publish(0, {"w": array})
    subscriber = ShardedSubscriber([store], {"w": Part(0, 16, 32)})
    (staged,) = await subscriber.prefetch(0)
    assert staged.wire_bytes == array.nbytes // 4 and staged.buckets == list(range(4, 8))
    found: list[np.ndarray] = []
    report = await subscriber.commit([staged], lambda name, tensor: found.append(tensor.numpy().copy()))
    assert np.array_equal(found[0], array[16:32]) and report.content_bytes == array.nbytes // 4
    staged.staging.array[5 * 256] ^= 1
    with pytest.raises(CorruptBucket, match="bucket 5"):
        await subscriber.commit([staged], lambda name, tensor: None)
    await subscriber.close()


async def test_a_version_is_there_when_every_rank_has_published_it() -> None:
    stores = [MemoryStore(), MemoryStore()]
    publishers = [Publisher(store) for store in stores]
    subscriber = ShardedSubscriber(stores, {})
    await publish(publishers, 0, weights())
    await publish([publishers[0], Publisher(MemoryStore())], 1, weights())
    with pytest.raises(VersionTimeout):
        await subscriber.prefetch(1, timeout=0.01)
    await subscriber.prefetch(0)
    await subscriber.close()


def ignore(name: str, tensor: Tensor) -> None:
    pass


async def test_missing_shards_and_parts_outside_are_named(memory: MemoryStore) -> None:
    publisher = Publisher(memory)
    await publisher.publish(0, {"w": np.ones((4, 2))}, {"w": Shard(0, 0, 8)})
    half = ShardedSubscriber([memory], {})
    with pytest.raises(BadTensor, match="'w' hold 8 of its 16"):
        await half.commit(await half.prefetch(0), ignore)
    outside = ShardedSubscriber([memory], {"w": Part(0, 4, 12)})
    with pytest.raises(BadTensor, match="outside"):
        await outside.prefetch(0)
    with pytest.raises(LayoutChanged, match="from 4 of 8"):
        await publisher.publish(1, {"w": np.ones((4, 2))}, {"w": Shard(0, 4, 8)})
    with pytest.raises(BadTensor, match="cannot be"):
        await Publisher(MemoryStore()).publish(0, {"w": np.ones((4, 2))}, {"w": Shard(0, 6, 8)})
    for subscriber in (half, outside):
        await subscriber.close()


async def test_a_version_staged_in_part_is_not_committed_whole(memory: MemoryStore) -> None:
    await Publisher(memory, bucket_bytes=64).publish(0, {"w": np.ones(64)})
    subscriber = Subscriber(memory, needs=lambda manifest: [1])
    with pytest.raises(BadTensor, match="in part"):
        await subscriber.commit(await subscriber.prefetch(0), ignore)
    await subscriber.close()
