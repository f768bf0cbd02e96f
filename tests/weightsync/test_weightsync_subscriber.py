"""How a pull waits, resumes, gives way and ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from weightsync import (
    BadManifest,
    BadTensor,
    CorruptBucket,
    EngineRefused,
    MemoryStore,
    Publisher,
    StoreFull,
    StoreUnavailable,
    Subscriber,
    Superseded,
    Tensor,
    TensorMeta,
    VersionGone,
    VersionTimeout,
)
from weightsync.tensors import Bytes


class CountingStore(MemoryStore):
    """Counts the buckets read, and can stop before one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.stop_at: int | None = None
        self.stopped = asyncio.Event()

    async def get_into(self, key: str, offset: int, buffer: Bytes) -> None:
        if self.stop_at == len(self.fetched):
            self.stopped.set()
            await asyncio.Event().wait()
        self.fetched.append(key)
        await super().get_into(key, offset, buffer)


def weights(seed: int) -> dict[str, np.ndarray]:
    return {"w": np.random.default_rng(seed).standard_normal(256).astype(np.float32)}


def ignore(name: str, tensor: Tensor) -> None:
    pass


@pytest.fixture
def store() -> CountingStore:
    return CountingStore()


async def test_a_prefetch_waits_for_its_version(store: CountingStore) -> None:
    publisher, subscriber = Publisher(store), Subscriber(store)
    waiting = asyncio.create_task(subscriber.prefetch(2))
    for version in range(3):
        await asyncio.sleep(0)
        assert not waiting.done()
        await publisher.publish(version, weights(version))
    staged = await waiting
    assert staged.version == 2 and staged.wire_bytes == 1024
    assert (await subscriber.commit(staged, ignore)).version == 2
    assert await subscriber.latest() == 2
    await subscriber.close()


async def test_a_version_that_never_comes_ends_the_wait(store: CountingStore) -> None:
    subscriber = Subscriber(store, timeout=0.01)
    with pytest.raises(VersionTimeout, match="latest is None"):
        await subscriber.prefetch(0)
    await Publisher(store).publish(4, weights(0))
    with pytest.raises(VersionTimeout, match="latest is 4"):
        await subscriber.prefetch(5)
    await subscriber.close()


async def test_a_skipped_version_is_gone(store: CountingStore) -> None:
    publisher, subscriber = Publisher(store), Subscriber(store)
    waiting = asyncio.create_task(subscriber.prefetch(3))
    await publisher.publish(2, weights(2))
    await publisher.publish(5, weights(5))
    with pytest.raises(VersionGone, match="3 was skipped or removed; latest is 5"):
        await waiting
    await subscriber.close()


@pytest.mark.parametrize(("data", "why"), [(b"\x81\xa6format\x09", "newer than 1"), (b"junk", "does not decode")])
async def test_a_manifest_that_cannot_be_read_is_named(store: CountingStore, data: bytes, why: str) -> None:
    subscriber = Subscriber(store)
    await store.put("v1.manifest", [np.frombuffer(data, np.uint8)])
    with pytest.raises(BadManifest, match=rf"'v1\.manifest'.*{why}"):
        await subscriber.prefetch(1)
    await subscriber.close()


async def test_a_newer_prefetch_supersedes(store: CountingStore) -> None:
    publisher, subscriber = Publisher(store, bucket_bytes=256), Subscriber(store)
    await publisher.publish(0, weights(0))
    store.stop_at = 2
    old = asyncio.create_task(subscriber.prefetch(0))
    await store.stopped.wait()
    store.stop_at = None
    await publisher.publish(1, weights(1))
    staged = await subscriber.prefetch(1)
    with pytest.raises(Superseded, match="superseded by another prefetch"):
        await old
    await subscriber.commit(staged, ignore)
    with pytest.raises(Superseded, match="no longer staged"):
        await subscriber.prefetch(0)
        await subscriber.commit(staged, ignore)
    await subscriber.close()


async def test_a_cancelled_pull_resumes(store: CountingStore) -> None:
    publisher, subscriber = Publisher(store, bucket_bytes=256), Subscriber(store)
    manifest = await publisher.publish(0, weights(0))
    store.stop_at = 3
    pull = asyncio.create_task(subscriber.prefetch(0))
    await store.stopped.wait()
    pull.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pull
    before, store.fetched, store.stop_at = store.fetched, [], None
    staged = await subscriber.prefetch(0)
    # What was not verified yet is fetched again: at most what was in flight.
    assert len(before) == 3 and len(store.fetched) <= 2
    assert {*before, *store.fetched} == {manifest.key(index) for index in range(4)}
    assert (await subscriber.commit(staged, ignore)).digest == manifest.digest
    await subscriber.close()


async def test_closing_ends_a_pull_that_is_stuck(store: CountingStore) -> None:
    publisher, subscriber = Publisher(store, bucket_bytes=256), Subscriber(store)
    await publisher.publish(0, weights(0))
    store.stop_at = 1
    pull = asyncio.create_task(subscriber.prefetch(0))
    await store.stopped.wait()
    await subscriber.close()
    with pytest.raises(Superseded):
        await pull


async def test_prefetches_of_one_version_share_a_pull(store: CountingStore) -> None:
    publisher, subscriber = Publisher(store), Subscriber(store)
    first, second, third = (asyncio.create_task(subscriber.prefetch(0)) for _ in range(3))
    await asyncio.sleep(0)
    first.cancel()
    await publisher.publish(0, weights(0))
    assert await second is await third
    assert await subscriber.prefetch(0) is await second
    assert len(store.fetched) == 1 and first.cancelled()
    await subscriber.close()


async def test_a_rewound_version_is_pulled_anew(store: CountingStore) -> None:
    publisher, subscriber = Publisher(store), Subscriber(store)
    await publisher.publish(0, weights(0))
    await publisher.publish(1, weights(1))
    old = await subscriber.prefetch(1)
    await publisher.rewind(0)
    manifest = await publisher.publish(1, weights(7))
    with pytest.raises(Superseded):
        new = await subscriber.prefetch(1)
        assert new.manifest == manifest
        await subscriber.commit(old, ignore)
    await subscriber.close()


async def test_commit_loads_every_name_or_nothing(store: CountingStore) -> None:
    array = np.arange(6.0)
    publisher, subscriber = Publisher(store), Subscriber(store)
    await publisher.publish(0, {"a": array, "tied": array, "b": np.array(3)})
    staged = await subscriber.prefetch(0)
    found: dict[str, Any] = {}
    report = await subscriber.commit(staged, lambda name, tensor: found.update({name: tensor.numpy().copy()}))
    assert list(found) == ["a", "tied", "b"] and report.tensors == 3 and report.content_bytes == 128
    assert np.array_equal(found["tied"], array) and found["b"] == 3

    class Load:
        def check(self, metas: Sequence[TensorMeta]) -> None:
            raise BadTensor(f"not {metas[0].name!r}")

        def __call__(self, name: str, tensor: Tensor) -> None:
            raise AssertionError("nothing is loaded")

    with pytest.raises(BadTensor, match="not 'a'"):
        await subscriber.commit(staged, Load())
    await subscriber.close()


async def test_staged_bytes_that_changed_are_refused_and_brought_again(store: CountingStore) -> None:
    subscriber = Subscriber(store)
    manifest = await Publisher(store, bucket_bytes=256).publish(0, weights(0))
    staged = await subscriber.prefetch(0)
    staged.staging.array[3] ^= 1
    with pytest.raises(CorruptBucket, match="has changed: prefetch it again"):
        await subscriber.commit(staged, ignore)
    again = await subscriber.prefetch(0)
    assert again is not staged and again.wire_bytes == 256, "the bucket that changed, and no other"
    assert (await subscriber.commit(again, ignore)).digest == manifest.digest
    await subscriber.close()


async def test_another_digest_is_refused(store: CountingStore) -> None:
    subscriber = Subscriber(store)
    await Publisher(store).publish(0, weights(0))
    staged = await subscriber.prefetch(0)

    async def load() -> str:
        return "something else"

    with pytest.raises(EngineRefused, match="loaded something else"):
        await subscriber.commit_with(staged, load)
    await subscriber.close()


async def test_a_prefetch_waits_for_the_commit_that_runs(store: CountingStore) -> None:
    publisher, subscriber = Publisher(store), Subscriber(store)
    await publisher.publish(0, weights(0))
    await publisher.publish(1, weights(1))
    staged = await subscriber.prefetch(0)
    loading, go_on = asyncio.Event(), asyncio.Event()

    async def load() -> str:
        loading.set()
        await go_on.wait()
        assert np.array_equal(staged.staging.array.view(np.float32), weights(0)["w"])
        return staged.manifest.digest

    commit = asyncio.create_task(subscriber.commit_with(staged, load))
    await loading.wait()
    following = asyncio.create_task(subscriber.prefetch(1))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not following.done()
    go_on.set()
    await commit
    assert (await following).version == 1
    await subscriber.close()


@pytest.mark.parametrize("error", [StoreFull, StoreUnavailable])
async def test_a_store_that_takes_no_hold_is_read_all_the_same(error: type[Exception]) -> None:
    """A read-only mount, or a full one."""

    class Refusing(MemoryStore):
        async def put(self, key: str, parts: Sequence[Bytes]) -> None:
            if ".hold." in key:
                raise error(key)
            await super().put(key, parts)

        async def delete(self, keys: Sequence[str]) -> None:
            raise StoreUnavailable("read-only")

    store = Refusing()
    manifest, subscriber = await Publisher(store).publish(0, weights(0)), Subscriber(store)
    report = await subscriber.commit(await subscriber.prefetch(0), ignore)
    assert report.digest == manifest.digest
    await subscriber.close()
