"""What every store promises, on each of them, from one process and from two."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from weightsync import (
    BadConfig,
    MemoryStore,
    Missing,
    Publisher,
    Store,
    StoreError,
    StoreFull,
    Subscriber,
    open_store,
)
from weightsync.tensors import Bytes, Tensor

RNG = np.random.default_rng(0)


def content(size: int) -> np.ndarray:
    return RNG.integers(0, 256, size, dtype=np.uint8)


async def check_objects(store: Store) -> None:
    parts = [content(1000), content(0), content(3), content(70_000)]
    whole = np.concatenate(parts)
    await store.put("a", parts)
    buffer = np.zeros(whole.size, np.uint8)
    await store.get_into("a", 0, buffer)
    assert np.array_equal(buffer, whole)
    await store.get_into("a", 990, buffer[:100])
    assert np.array_equal(buffer[:100], whole[990:1090])
    assert await store.get("a") == whole.tobytes()
    await store.put("a", [content(5)])
    assert await store.get("a") == whole.tobytes(), "an object that exists stays"
    assert await store.present(["a", "b"]) == [True, False]


async def check_absence(store: Store) -> None:
    await store.put("short", [content(10)])
    with pytest.raises(Missing, match="'gone'"):
        await store.get_into("gone", 0, np.zeros(4, np.uint8))
    with pytest.raises(StoreError, match="'short'"):
        await store.get_into("short", 4, np.zeros(10, np.uint8))
    assert await store.get("gone") is None and await store.read("gone") is None
    await store.delete(["gone", "short"])
    assert await store.get("short") is None


async def check_values(store: Store) -> None:
    await store.replace("value", b"1")
    assert await store.read("value") == b"1"
    waiting = asyncio.create_task(store.changed("value", b"1"))
    await asyncio.sleep(0)
    await store.replace("value", b"1")
    await store.replace("value", b"22")
    assert await asyncio.wait_for(waiting, 10) == b"22"
    assert await store.changed("value", None) == b"22"
    cancelled = asyncio.create_task(store.changed("value", b"22"))
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled


async def test_memory_store() -> None:
    store = MemoryStore()
    for check in (check_objects, check_absence, check_values):
        await check(store)


async def test_shared_stores(shared: Store) -> None:
    for check in (check_objects, check_absence, check_values):
        await check(shared)


READER = """
import asyncio, sys
import numpy as np
from weightsync import Subscriber, open_store

async def main():
    store = open_store(sys.argv[1])
    subscriber = Subscriber(store)
    for version in range(3):
        staged = await subscriber.prefetch(version, timeout=60)
        got = {}
        report = await subscriber.commit(staged, lambda name, tensor: got.update({name: tensor.data.tobytes().hex()}))
        print(report.digest, *(f"{name}={data}" for name, data in got.items()), flush=True)
    await store.close()

asyncio.run(main())
"""


@pytest.mark.real
async def test_another_process_reads_byte_for_byte(shared: Store, url: str) -> None:
    reader = await asyncio.create_subprocess_exec(sys.executable, "-c", READER, url, stdout=asyncio.subprocess.PIPE)
    assert reader.stdout is not None
    publisher = Publisher(shared, bucket_bytes=128, encoding="delta")
    weights = {"w": RNG.standard_normal((9, 13)).astype(np.float32), "b": content(31), "scalar": np.array(1.5)}
    try:
        for version in range(3):
            weights["w"][version] = -0.0
            manifest = await publisher.publish(version, weights)
            digest, *tensors = (await reader.stdout.readline()).decode().split()
            assert digest == manifest.digest
            assert tensors == [f"{name}={array.tobytes().hex()}" for name, array in weights.items()]
        assert await reader.wait() == 0
    finally:
        if reader.returncode is None:
            reader.kill()
            await reader.wait()


WRITER = """
import asyncio, sys
import numpy as np
from weightsync import FileStore

async def main():
    store = FileStore(sys.argv[1], durable=False)
    print("ready", flush=True)
    sys.stdin.read(1)
    value = np.full(70_000, int(sys.argv[2]), np.uint8)
    for number in range(200):
        await store.put(f"k{number}", [value])
        await store.replace("value", value.tobytes())

asyncio.run(main())
"""


@pytest.mark.real
async def test_writers_of_one_key_wait_for_each_other(tmp_path: Path) -> None:
    """One of the objects that are written at once stays; nobody fails, and no reader sees a mixture."""
    command, pipe = (sys.executable, "-c", WRITER, str(tmp_path)), asyncio.subprocess.PIPE
    writers = [
        await asyncio.create_subprocess_exec(*command, str(number), stdin=pipe, stdout=pipe) for number in range(3)
    ]
    for writer in writers:
        assert writer.stdout and await writer.stdout.readline() == b"ready\n"
    for writer in writers:
        assert writer.stdin
        writer.stdin.write(b"g")
        writer.stdin.close()
    store = open_store(f"file:{tmp_path}")
    while any(writer.returncode is None for writer in writers):
        value = await store.read("value")
        assert value is None or (len(value) == 70_000 and len(set(value)) == 1)
        await asyncio.sleep(0.01)
    assert [writer.returncode for writer in writers] == [0] * 3
    for number in range(200):
        data = await store.get(f"k{number}")
        assert data is not None and len(data) == 70_000 and len(set(data)) == 1
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


async def test_a_full_store_says_so_and_recovers() -> None:
    class Full(MemoryStore):
        room = 5000

        async def put(self, key: str, parts: Sequence[Bytes]) -> None:
            if sum(data.size for data in self._objects.values()) + sum(part.size for part in parts) > self.room:
                raise StoreFull(f"no room for {key!r}")
            await super().put(key, parts)

    store = Full()
    publisher = Publisher(store, bucket_bytes=1024, keep=1)
    await publisher.publish(0, {"w": content(2000)})
    big = {"w": content(2000)}
    store.room = 4000
    with pytest.raises(StoreFull):
        await publisher.publish(1, big)
    subscriber = Subscriber(store)
    await subscriber.prefetch(0)
    store.room = 5000
    manifest = await publisher.publish(1, big)
    got: list[Tensor] = []
    report = await subscriber.commit(await subscriber.prefetch(1), lambda name, tensor: got.append(tensor))
    assert report.digest == manifest.digest
    assert np.array_equal(got[0].numpy(), big["w"])
    await subscriber.close()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "shm:",
        "shm:a/b",
        "http://x",
        "file:",
        "mooncake://host",
        "mooncake://h:0",
        "mooncake://h:99999",
        "memory:x",
    ],
)
def test_a_bad_url_names_what_is_allowed(url: str) -> None:
    with pytest.raises(BadConfig, match="use "):
        open_store(url)
