"""Shared memory: spares, mappings, and readers that are overtaken."""

from __future__ import annotations

import os
import stat
import uuid
from collections.abc import Iterator

import numpy as np
import pytest

from weightsync import (
    CorruptBucket,
    Publisher,
    SharedMemoryStore,
    StoreError,
    StoreFull,
    StoreUnavailable,
    Subscriber,
    VersionGone,
)
from weightsync.tensors import Bytes

MIB = 1 << 20


@pytest.fixture
def store() -> Iterator[SharedMemoryStore]:
    store = SharedMemoryStore(f"test-{uuid.uuid4().hex}")
    yield store
    store.unlink()


def files(store: SharedMemoryStore) -> dict[str, int]:
    return {name: os.stat(store.folder / name).st_ino for name in os.listdir(store.folder)}


async def test_the_files_of_deleted_objects_are_used_again(store: SharedMemoryStore) -> None:
    for key, size in (("a", MIB), ("b", 2 * MIB), ("small", 100)):
        await store.put(key, [np.full(size, 1, np.uint8)])
    before = files(store)
    await store.delete(["a", "b", "small"])
    assert sorted(files(store).values()) == sorted([before["a"], before["b"]])
    halves = [np.full(MIB // 2, 2, np.uint8), np.full(MIB // 2, 3, np.uint8)]
    await store.put("c", halves)
    assert files(store)["c"] == before["a"]
    assert await store.get("c") == np.concatenate(halves).tobytes()
    # What nobody wanted until the next large object goes is freed.
    await store.delete(["nothing"])
    assert sorted(files(store).values()) == sorted([before["a"], before["b"]])
    await store.delete(["c"])
    assert list(files(store).values()) == [before["a"]]


async def test_a_second_process_sees_what_a_kept_mapping_holds(store: SharedMemoryStore) -> None:
    other = SharedMemoryStore(store.folder.name.removeprefix("weightsync-"))
    buffer = np.zeros(MIB, np.uint8)
    for value in range(1, 4):
        await store.put(f"k{value}", [np.full(MIB, value, np.uint8)])
        await other.get_into(f"k{value}", 0, buffer)
        assert (buffer == value).all()
        await store.delete([f"k{value}"])
    with pytest.raises(StoreError, match="ends 5 bytes early"):
        await store.put("short", [np.zeros(MIB, np.uint8)])
        await other.get_into("short", 5, buffer)
    await other.close()


async def test_retention_keeps_one_set_of_spares(store: SharedMemoryStore) -> None:
    publisher, subscriber = Publisher(store, bucket_bytes=MIB, keep=2), Subscriber(store)
    for version in range(5):
        manifest = await publisher.publish(version, {"w": np.full(MIB, version, np.float32)})
        staged = await subscriber.prefetch(version)
        report = await subscriber.commit(staged, lambda name, tensor: None)
        assert report.digest == manifest.digest
    large = [name for name in os.listdir(store.folder) if os.stat(store.folder / name).st_size >= MIB]
    assert len(large) == 3 * 4 and sum(name.startswith(".spare") for name in large) == 4
    await subscriber.close()


async def test_a_reader_that_is_overtaken_notices(store: SharedMemoryStore) -> None:
    """Its version is removed and the memory used again while it copies."""
    publisher, subscriber = Publisher(store, keep=1, hold_seconds=0), Subscriber(store)
    await publisher.publish(0, {"w": np.full(MIB, 0, np.float32)})
    get_into, overtaken = store.get_into, False

    async def slow(key: str, offset: int, buffer: Bytes) -> None:
        nonlocal overtaken
        if not overtaken:
            overtaken = True
            await publisher.publish(1, {"w": np.full(MIB, 1, np.float32)})
            await publisher.publish(2, {"w": np.full(MIB, 2, np.float32)})
            buffer[:] = 2
            return
        await get_into(key, offset, buffer)

    store.get_into = slow  # type: ignore[method-assign]
    with pytest.raises((VersionGone, CorruptBucket)):
        await subscriber.prefetch(0)
    assert (await subscriber.prefetch(2)).version == 2
    await subscriber.close()


async def test_too_little_shared_memory_says_so(store: SharedMemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(StoreFull, match=r"'k' of 2097152 bytes .* enlarge /dev/shm"):
        await store.put("k", [np.zeros(2 * MIB, np.uint8)])
    assert not files(store)


def test_other_users_may_not_look_in(store: SharedMemoryStore) -> None:
    assert stat.S_IMODE(os.stat(store.folder).st_mode) == 0o700


async def test_what_cannot_be_opened_is_unavailable(store: SharedMemoryStore) -> None:
    (store.folder / "k").mkdir()
    with pytest.raises(StoreUnavailable, match="cannot read 'k'"):
        await store.get_into("k", 0, np.zeros(MIB, np.uint8))
    (store.folder / "k").rmdir()
