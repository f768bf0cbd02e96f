"""A publisher killed at any moment, objects that rot, stores that forget: what was good stays usable."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from weightsync import (
    CorruptBucket,
    FileStore,
    MemoryStore,
    Publisher,
    StoreError,
    StoreUnavailable,
    Subscriber,
    Tensor,
    inspect,
)
from weightsync.tensors import Bytes

# Publishes versions 1 and 2 on top of version 0, and dies by SIGKILL in the middle of the n-th change to the store's
# folder; for every n, each in a forked process and a folder of its own, until one survives.
DOOMED = """
import asyncio, os, signal, sys
import numpy as np
from weightsync import FileStore, Publisher

class Doomed(FileStore):
    left = 1 << 30

    def countdown(self):
        self.left -= 1
        return self.left < 0

    def _write(self, key, parts, once):
        if self.countdown():
            whole = b"".join(bytes(part) for part in parts)
            (self.folder / f".{key}.part").write_bytes(whole[: len(whole) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        super()._write(key, parts, once)

    def _delete(self, keys):
        if self.countdown():
            super()._delete(keys[: len(keys) // 4])
            os.kill(os.getpid(), signal.SIGKILL)
        super()._delete(keys)

async def publish(folder, step, encoding):
    store = Doomed(folder, durable=False)
    publisher = Publisher(store, bucket_bytes=256, keep=1, encoding=encoding)
    await publisher.publish(0, {"w": np.zeros(200, np.float32)})
    store.left = step
    for version in (1, 2):
        await publisher.publish(version, {"w": np.full(200, version, np.float32)})

step, status = 0, signal.SIGKILL
while status == signal.SIGKILL:
    child = os.fork()
    if not child:
        asyncio.run(publish(f"{sys.argv[1]}/{step}", step, sys.argv[2]))
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    step += 1
sys.exit(status)
"""


def ignore(name: str, tensor: Tensor) -> None:
    pass


@pytest.mark.real
@pytest.mark.parametrize("encoding", ["full", "delta"])
async def test_a_publisher_killed_at_any_store_operation(tmp_path: Path, encoding: str) -> None:
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", DOOMED, str(tmp_path), encoding)
    assert await child.wait() == 0
    folders = [tmp_path / name for name in os.listdir(tmp_path)]
    assert len(folders) > 12
    for folder in folders:
        await check_survivor(folder)


async def check_survivor(folder: Path) -> None:
    """Some version is whole, and so is every version that exists; the next publisher leaves no trace of the dead."""
    store = FileStore(folder, durable=False)
    subscriber = Subscriber(store, timeout=10)
    found = await inspect(store)
    assert found and not any(info.bad for info in found)
    last = found[-1].version
    staged = await subscriber.prefetch(last)
    report = await subscriber.commit(staged, ignore)
    assert report.digest == found[-1].digest
    assert staged.staging.array.view(np.float32)[:200].tolist() == [last] * 200
    publisher = Publisher(store, bucket_bytes=256, keep=1)
    manifest = await publisher.publish(3, {"w": np.full(200, 3, np.float32)})
    assert (await subscriber.prefetch(3)).manifest == manifest
    await subscriber.close()
    expected = {"index", "v3.manifest", *(manifest.key(index) for index in range(len(manifest.buckets)))}
    assert set(os.listdir(folder)) == expected


class RottingStore(MemoryStore):
    """Flips a bit in the next `bad` buckets that are read."""

    bad = 0
    reads = 0

    async def get_into(self, key: str, offset: int, buffer: Bytes) -> None:
        await super().get_into(key, offset, buffer)
        self.reads += 1
        if self.bad:
            self.bad -= 1
            buffer[-1] ^= 64


@pytest.mark.parametrize("encoding", ["full", "delta"])
async def test_a_corrupt_bucket_is_fetched_again_then_refused(encoding: str) -> None:
    store = RottingStore()
    publisher = Publisher(store, encoding=encoding)  # type: ignore[arg-type]
    weights = np.arange(1000, dtype=np.float32)
    subscriber = Subscriber(store)
    for version in range(2):
        weights[version] = 7
        manifest = await publisher.publish(version, {"w": weights})
        store.bad, store.reads = 1, 0
        staged = await subscriber.prefetch(version)
        assert store.reads == 2
        assert (await subscriber.commit(staged, ignore)).digest == manifest.digest
    weights[5] = 7
    await publisher.publish(2, {"w": weights})
    store.bad = 2
    with pytest.raises(CorruptBucket, match=r"v2\..*twice"):
        await subscriber.prefetch(2)
    assert (await subscriber.prefetch(2)).version == 2
    assert subscriber.stats().refetched == 3
    await subscriber.close()


async def test_a_truncated_bucket_is_named(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    manifest = await Publisher(store).publish(0, {"w": np.ones(1000)})
    os.truncate(tmp_path / manifest.key(0), 100)
    subscriber = Subscriber(store)
    with pytest.raises(StoreError, match=manifest.key(0)):
        await subscriber.prefetch(0)
    assert [info.bad for info in await inspect(store)] == [(0,)]
    await subscriber.close()


async def test_a_store_that_forgot_everything_is_filled_again(memory: MemoryStore) -> None:
    publisher, subscriber = Publisher(memory, encoding="delta"), Subscriber(memory)
    weights = np.zeros(1000, np.float32)
    for version in range(2):
        await publisher.publish(version, {"w": weights})
    await subscriber.prefetch(1)
    memory._objects.clear()
    memory._values.clear()
    weights[3] = 1
    manifest = await publisher.publish(2, {"w": weights})
    assert manifest.base is None, "there is no base to build on"
    assert (await subscriber.prefetch(2)).manifest == manifest
    await subscriber.close()


async def test_a_store_that_fails_during_a_publication_loses_nothing(memory: MemoryStore) -> None:
    publisher, subscriber = Publisher(memory, bucket_bytes=256, encoding="delta"), Subscriber(memory)
    weights = np.zeros(1000, np.float32)
    await publisher.publish(0, {"w": weights})
    put = memory.put
    for step in range(5):
        weights += 1
        left = step

        async def failing(key: str, parts: list[Bytes]) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise StoreUnavailable("gone for a moment")
            await put(key, parts)

        memory.put = failing  # type: ignore[assignment]
        with pytest.raises(StoreUnavailable):
            await publisher.publish(1, {"w": weights})
        memory.put = put  # type: ignore[method-assign]
        assert await subscriber.latest() == 0 and not any(info.bad for info in await inspect(memory))
    manifest = await publisher.publish(1, {"w": weights})
    staged = await subscriber.prefetch(1)
    assert (await subscriber.commit(staged, ignore)).digest == manifest.digest
    assert len(memory._objects) == 2 * (1 + len(manifest.buckets))
    await subscriber.close()


async def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailable, match="cannot make"):
        FileStore(tmp_path / "file" / "store")
    store = FileStore(tmp_path / "store")
    store.folder.rmdir()
    with pytest.raises(StoreUnavailable, match="cannot write 'index'"):
        await Publisher(store).publish(0, {"w": np.ones(1)})
