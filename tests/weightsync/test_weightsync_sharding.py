"""Shards of one degree of tensor parallelism arrive as parts of another, byte for byte."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync import (
    BadConfig,
    BadTensor,
    CorruptBucket,
    EngineRefused,
    LayoutChanged,
    Load,
    MemoryStore,
    Part,
    Plan,
    Publisher,
    Shard,
    ShardedSubscriber,
    Subscriber,
    Tensor,
    TensorMeta,
    VersionTimeout,
    combined,
)
from weightsync.checksum import LEAF_BYTES
from weightsync.handover import in_leaves
from weightsync.tensors import Bytes

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


class CountingStore(MemoryStore):
    """Remembers which bytes of buckets were read."""

    def __init__(self) -> None:
        super().__init__()
        self.read_ranges: list[tuple[str, int, int]] = []

    async def get_into(self, key: str, offset: int, buffer: Bytes) -> None:
        self.read_ranges.append((key, offset, offset + buffer.size))
        await super().get_into(key, offset, buffer)

    @property
    def read_bytes(self) -> int:
        return sum(stop - start for _, start, stop in self.read_ranges)


@pytest.mark.parametrize("bucket_bytes", [LEAF_BYTES, 1 << 30])
@pytest.mark.parametrize(("trainers", "readers"), [(4, 2), (2, 4), (1, 2)])
async def test_readers_fetch_the_byte_ranges_they_need(trainers: int, readers: int, bucket_bytes: int) -> None:
    """Whatever the bucket size: all readers together read each byte once, and what every rank has from the first."""
    shape = {"w": (16 * LEAF_BYTES // 64, 64), "v": (8 * LEAF_BYTES // 64, 64)}
    rng = np.random.default_rng(0)
    full = {name: rng.integers(0, 256, size, dtype=np.uint8) for name, size in shape.items()}
    norm = np.arange(16, dtype=np.float32)
    stores = [CountingStore() for _ in range(trainers)]
    for rank, store in enumerate(stores):
        tensors: dict[str, np.ndarray] = {"norm": norm}
        shards = {}
        for name, array in full.items():
            tensors[name], span = cut(array, 0, rank, trainers)
            assert span is not None
            shards[name] = Shard(0, span[0], len(array))
        await Publisher(store, bucket_bytes=bucket_bytes).publish(0, tensors, shards)
    for rank in range(readers):
        wanted = {name: Part(0, rank * len(a) // readers, (rank + 1) * len(a) // readers) for name, a in full.items()}
        subscriber = ShardedSubscriber(stores, wanted)
        before = sum(store.read_bytes for store in stores)
        found: dict[str, np.ndarray] = {}
        staged = await subscriber.prefetch(0)
        await subscriber.commit(staged, keep(found))
        for name, array in full.items():
            assert np.array_equal(found[name], array[wanted[name].start : wanted[name].stop])
        assert np.array_equal(found["norm"], norm)
        read = sum(store.read_bytes for store in stores) - before
        # Shards begin a few bytes behind a leaf, because the norm lies before them: a leaf more for each that is cut.
        cuts = len(full) * (1 + trainers // readers) + 1
        assert 24 * LEAF_BYTES // readers <= read <= 24 * LEAF_BYTES // readers + cuts * LEAF_BYTES
        assert read == sum(each.wire_bytes for each in staged)
        await subscriber.close()


async def test_readers_fetch_only_the_buckets_they_need() -> None:
    store = MemoryStore()
    array = np.arange(1024, dtype=np.float32).reshape(64, 16)
    await Publisher(store, bucket_bytes=256).publish(0, {"w": array})
    subscriber = ShardedSubscriber([store], {"w": Part(0, 16, 32)})
    (staged,) = await subscriber.prefetch(0)
    assert staged.wire_bytes == array.nbytes // 4 and list(staged.ranges) == list(range(4, 8))
    found: list[np.ndarray] = []
    report = await subscriber.commit([staged], lambda name, tensor: found.append(tensor.numpy().copy()))
    assert np.array_equal(found[0], array[16:32]) and report.content_bytes == array.nbytes // 4
    staged.staging.array[5 * 256] ^= 1
    with pytest.raises(CorruptBucket, match="bucket 5"):
        await subscriber.commit([staged], lambda name, tensor: None)
    await subscriber.close()


@given(st.data(), st.integers(1, 6), st.integers(1, 40))
def test_leaves_cover_spans_and_little_more(data: st.DataObject, bucket_leaves: int, size: int) -> None:
    """Every byte of every span, no leaf without one, in ranges that are apart."""
    bucket, total = bucket_leaves * LEAF_BYTES // 2, size * LEAF_BYTES // 4
    plan = Plan((TensorMeta("w", "uint8", (total,)),), bucket)
    edges = data.draw(st.lists(st.integers(0, total), min_size=2, max_size=8).map(sorted))
    spans = [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=False) if start < stop]
    wanted = {
        (byte // bucket, byte % bucket // LEAF_BYTES)
        for start, stop in spans
        for byte in (*range(start, stop, LEAF_BYTES // 4), stop - 1)
    }
    found: set[tuple[int, int]] = set()
    for index, ranges in in_leaves(plan, spans).items():
        ends = [-1]
        for start, stop in ranges:
            assert ends[-1] < start < stop <= plan.size(index) and start % LEAF_BYTES == 0
            assert stop % LEAF_BYTES == 0 or stop == plan.size(index)
            ends.append(stop)
            found.update((index, leaf) for leaf in range(start // LEAF_BYTES, -(-stop // LEAF_BYTES)))
    assert found == wanted


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
    with pytest.raises(BadTensor, match="shards has 'v'"):
        await publisher.publish(1, {"w": np.ones((4, 2))}, {"v": Shard(0, 0, 8)})
    for subscriber in (half, outside):
        await subscriber.close()


async def test_a_version_staged_in_part_is_not_committed_whole(memory: MemoryStore) -> None:
    await Publisher(memory, bucket_bytes=64).publish(0, {"w": np.ones(64)})
    subscriber = Subscriber(memory, needs=lambda plan: {1: [(0, 64)]})
    with pytest.raises(BadTensor, match="in part"):
        await subscriber.commit(await subscriber.prefetch(0), ignore)
    await subscriber.close()


async def test_a_rank_without_tensors_publishes_that(memory: MemoryStore) -> None:
    """More ranks than tensors: the version is there when all have published, the empty-handed too."""
    stores = [memory, MemoryStore()]
    whole = np.arange(8, dtype=np.float32)
    await Publisher(stores[0]).publish(0, {"w": whole}, {"w": Shard(0, 0, 8)})
    await Publisher(stores[1]).publish(0, {})
    subscriber = ShardedSubscriber(stores, {})
    found: dict[str, np.ndarray] = {}
    await subscriber.commit(await subscriber.prefetch(0), keep(found))
    assert np.array_equal(found["w"], whole)
    await subscriber.close()


async def test_committing_by_other_means_takes_the_digest_of_all_ranks() -> None:
    stores = [MemoryStore(), MemoryStore()]
    await publish([Publisher(store) for store in stores], 0, weights())
    subscriber = ShardedSubscriber(stores, {})
    staged = await subscriber.prefetch(0)
    digests = [one.manifest.digest for one in staged]

    async def load(digest: str) -> str:
        return digest

    report = await subscriber.commit_with(staged, lambda: load(combined(digests)))
    assert (report.version, report.digest, report.tensors) == (0, combined(digests), len(MODEL))
    assert combined(digests[:1]) == digests[0]
    for wrong in (digests[0], combined(digests[::-1])):
        with pytest.raises(EngineRefused, match="published"):
            await subscriber.commit_with(staged, lambda digest=wrong: load(digest))  # type: ignore[misc]
    await subscriber.close()


async def ranks(*tensors: Mapping[str, tuple[np.ndarray, Shard | None]]) -> ShardedSubscriber:
    stores = [MemoryStore() for _ in tensors]
    for store, named in zip(stores, tensors, strict=True):
        shards = {name: shard for name, (_, shard) in named.items() if shard is not None}
        await Publisher(store).publish(0, {name: array for name, (array, _) in named.items()}, shards)
    return ShardedSubscriber(stores, {})


HALF = np.ones((4, 2), np.float32)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ((HALF, Shard(0, 0, 8)), (HALF, Shard(0, 0, 8)), "'w' hold 8 of its 16"),
        ((HALF, Shard(0, 0, 6)), (HALF, Shard(0, 2, 6)), "two shards of 'w' overlap"),
        ((HALF, Shard(0, 0, 8)), (HALF, Shard(1, 0, 4)), "the ranks disagree on tensor 'w'"),
        ((HALF, Shard(0, 0, 8)), (HALF.view(np.int32), Shard(0, 4, 8)), "the ranks disagree on tensor 'w'"),
        ((HALF, Shard(0, 0, 8)), (HALF, Shard(0, 4, 9)), "the ranks disagree on tensor 'w'"),
        ((np.ones((4, 4)), Shard(0, 0, 8)), (np.ones((8, 2)), Shard(1, 2, 4)), "two shards of 'w' overlap"),
    ],
)
async def test_shards_that_make_no_whole_are_named(first: Any, second: Any, message: str) -> None:
    """Ranks that believe to be the same one, of different degrees, of different models."""
    subscriber = await ranks({"w": first}, {"w": second})
    with pytest.raises(BadTensor, match=message):
        await subscriber.commit(await subscriber.prefetch(0), ignore)
    await subscriber.close()


async def test_what_only_a_later_rank_has_whole_is_refused_not_left_empty() -> None:
    subscriber = await ranks({"v": (HALF, None)}, {"w": (HALF, None)})
    with pytest.raises(BadTensor, match=r"only rank 1 has tensor 'w'.*Shard\(0, 0,"):
        await subscriber.commit(await subscriber.prefetch(0), ignore)
    await subscriber.close()
    subscriber = await ranks({"v": (HALF, None)}, {"w": (HALF, Shard(0, 0, 4))})
    found: dict[str, np.ndarray] = {}
    await subscriber.commit(await subscriber.prefetch(0), keep(found))
    assert np.array_equal(found["w"], HALF)
    await subscriber.close()


async def test_shards_that_repeat_are_taken_once() -> None:
    """As the heads of keys and values, where there are fewer than ranks."""
    other = HALF + 1
    subscriber = await ranks(*({"w": (half, Shard(0, at, 8))} for half, at in ((HALF, 0), (HALF, 0), (other, 4))))
    found: dict[str, np.ndarray] = {}
    await subscriber.commit(await subscriber.prefetch(0), keep(found))
    assert np.array_equal(found["w"], np.concatenate([HALF, other]))
    await subscriber.close()


async def test_a_part_that_nobody_has_is_named(memory: MemoryStore) -> None:
    await Publisher(memory).publish(0, {"w": HALF})
    subscriber = ShardedSubscriber([memory], {"x": Part(0, 0, 2)})
    with pytest.raises(BadTensor, match="part of tensor 'x' is wanted"):
        await subscriber.commit(await subscriber.prefetch(0), ignore)
    await subscriber.close()


async def test_what_does_not_fit_is_refused_before_anything_is_loaded() -> None:
    """Of parts as of whole tensors: copied over each other, they might be broadcast or converted."""

    class Fits:
        metas: Sequence[TensorMeta] = ()

        def check(self, metas: Sequence[TensorMeta]) -> None:
            self.metas = metas
            raise BadTensor("no")

        def __call__(self, name: str, tensor: Tensor) -> None:
            raise AssertionError("nothing is loaded")

    subscriber, load, nothing = (
        await ranks({"w": (HALF, Shard(0, 0, 8))}, {"w": (HALF, Shard(0, 4, 8))}),
        Fits(),
        None,
    )
    staged = await subscriber.prefetch(0)
    with pytest.raises(BadTensor, match="no"):
        await subscriber.commit(staged, load)
    assert load.metas == [TensorMeta("w", "float32", (8, 2))]
    with pytest.raises(BadConfig, match="load is None"):
        await subscriber.commit(staged, nothing)  # type: ignore[arg-type]
    await subscriber.close()
