"""What is special about Mooncake: its master, its codes, and processes that die."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
import uuid

import numpy as np
import pytest

from weightsync import Publisher, StoreFull, StoreUnavailable, Subscriber, open_store
from weightsync.mooncake import MooncakeStore
from weightsync.mooncake_master import MooncakeMaster

pytestmark = pytest.mark.real

PUBLISH_AND_DIE = """
import asyncio, os, signal, sys
import numpy as np
from weightsync import Publisher, open_store

async def main():
    publisher = Publisher(open_store(sys.argv[1]), bucket_bytes=1 << 20)
    await publisher.publish(0, {"w": np.arange(1 << 19, dtype=np.float32)})
    publisher._store._replace = lambda key, value: os.kill(os.getpid(), signal.SIGKILL)
    await publisher.publish(1, {"w": np.ones(1 << 19, np.float32)})

asyncio.run(main())
"""

START_AND_WAIT = """
import asyncio
from weightsync.mooncake_master import MooncakeMaster

async def main():
    async with MooncakeMaster(segment_bytes=16 << 20) as master:
        print(*master.pids, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_killed_publisher_leaves_the_last_version(mooncake: MooncakeMaster) -> None:
    url = mooncake.url(uuid.uuid4().hex)
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", PUBLISH_AND_DIE, url)
    assert await child.wait() == -signal.SIGKILL
    store = open_store(url)
    subscriber = Subscriber(store)
    staged = await subscriber.prefetch(0, timeout=60)
    assert np.array_equal(staged.staging.array.view(np.float32), np.arange(1 << 19, dtype=np.float32))
    manifest = await Publisher(store, bucket_bytes=1 << 20).publish(1, {"w": np.full(1 << 19, 5, np.float32)})
    assert (await subscriber.prefetch(1)).manifest == manifest
    await subscriber.close()
    await store.close()


async def test_objects_are_not_evicted_and_a_full_store_says_so(mooncake: MooncakeMaster) -> None:
    store = open_store(mooncake.url(uuid.uuid4().hex))
    block = np.ones(8 << 20, np.uint8)
    keys = [f"k{number}" for number in range(20)]
    stored = 0
    with pytest.raises(StoreFull, match="lend larger segments"):
        for key in keys:
            await store.put(key, [block])
            stored += 1
    assert stored >= 8 and await store.present(keys) == [number < stored for number in range(20)]
    await store.delete(keys)
    with pytest.raises(StoreFull):
        await store.put("huge", [np.ones(200 << 20, np.uint8)])
    await store.close()


async def test_values_stay_readable_while_they_are_replaced(mooncake: MooncakeMaster) -> None:
    url = mooncake.url(uuid.uuid4().hex)
    writer, reader = open_store(url), open_store(url)
    await writer.replace("value", b"0000")
    done = asyncio.Event()

    async def write() -> None:
        for number in range(1, 300):
            await writer.replace("value", f"{number:04}".encode() * (1 + number % 3))
        done.set()

    task = asyncio.create_task(write())
    last = 0
    while not done.is_set():
        value = await reader.read("value")
        assert value is not None
        number = int(value[:4])
        assert number >= last - 1 and value == f"{number:04}".encode() * (1 + number % 3)
        last = number
    await task
    await writer.close()
    await reader.close()


async def test_a_dead_master_is_unavailable_not_a_hang() -> None:
    async with MooncakeMaster(segment_bytes=16 << 20) as master:
        store = open_store(master.url())
        publisher, subscriber = Publisher(store), Subscriber(store)
        await publisher.publish(0, {"w": np.ones(4)})
        os.kill(master.pids[0], signal.SIGKILL)
        with pytest.raises(StoreUnavailable):
            await publisher.publish(1, {"w": np.ones(4)})
        with pytest.raises(StoreUnavailable):
            await subscriber.prefetch(0)
        await subscriber.close()
        await store.close()
    with pytest.raises(StoreUnavailable, match="no Mooncake master answers"):
        MooncakeStore("127.0.0.1:9")


async def test_the_master_dies_with_its_parent() -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", START_AND_WAIT, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in (await parent.stdout.readline()).split()]
    handles = [os.pidfd_open(pid) for pid in pids]
    parent.kill()
    await parent.wait()
    for handle in handles:
        assert select.select([handle], [], [], 20)[0], "a child outlived its parent"
        os.close(handle)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(StoreUnavailable, match=r"pip install rollart-weightsync\[mooncake\]"):
        open_store("mooncake://127.0.0.1:1")


def test_a_missing_system_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Finder:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> None:
            if name == "mooncake.store":
                raise ImportError("libibverbs.so.1: cannot open shared object file")

    monkeypatch.delitem(sys.modules, "mooncake.store", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    with pytest.raises(StoreUnavailable, match="Debian package libibverbs1"):
        open_store("mooncake://127.0.0.1:1")
