"""What is special about Mooncake: its master, its codes, and processes that die."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weightsync import Publisher, StoreError, StoreFull, StoreUnavailable, Subscriber, open_store
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


class Mortal:
    """A store whose master is killed before a certain call; knows the calls that were made."""

    def __init__(self, store: MooncakeStore, pid: int) -> None:
        self._store, self._pid = store, pid
        self.left: int | None = None
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        async def counted(*args: Any) -> Any:
            if self.left == len(self.calls):
                os.kill(self._pid, signal.SIGKILL)
            self.calls.append(name)
            return await call(*args)

        return counted


async def killed_at(step: int, publishing: bool) -> str | None:
    """The call before which the master was killed; None if there was no such call. Nobody hangs, or is told a lie."""
    array = np.arange(1 << 10, dtype=np.float32)
    async with MooncakeMaster(segment_bytes=16 << 20) as master:
        store: Any = Mortal(MooncakeStore(master.address), master.pids[0])
        publisher, subscriber = Publisher(store, hold_seconds=0), Subscriber(store)
        for version in range(2 if publishing else 3):
            await publisher.publish(version, {"w": array + version})
        store.calls, store.left = [], step
        work = publisher.publish(2, {"w": array + 2}) if publishing else subscriber.prefetch(2)
        found: BaseException | None = None
        async with asyncio.timeout(90):
            try:
                await work
            except StoreUnavailable as error:
                found = error
        called = store.calls[step] if step < len(store.calls) else None
        assert (found is None) == (called is None), called
        await subscriber.close()
        await store.close()
        return called


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("publishing", "stages"),
    [
        (True, ["read", "replace", "put", "read", "put", "get", "replace", "present", "delete"]),
        (False, ["get", "put", "get_into", "delete"]),
    ],
    ids=["publisher", "subscriber"],
)
async def test_the_master_killed_at_every_stage(publishing: bool, stages: list[str]) -> None:
    found = [await killed_at(step, publishing) for step in range(len(stages) + 1)]
    assert found == [*stages, None]


async def test_a_restarted_master_is_filled_again() -> None:
    """It has forgotten everything; its clients come back by themselves, and the next version is whole."""
    array = np.arange(1 << 18, dtype=np.float32)
    async with MooncakeMaster(segment_bytes=16 << 20) as master:
        store = MooncakeStore(master.address)
        publisher, subscriber = Publisher(store, encoding="delta"), Subscriber(store)
        for version in range(2):
            array[version] = 7
            await publisher.publish(version, {"w": array})
        await subscriber.prefetch(1)
        os.kill(master.pids[0], signal.SIGKILL)
        with pytest.raises(StoreUnavailable):
            await publisher.publish(2, {"w": array})
        binary, port = Path(sys.executable).with_name("mooncake_master"), master.address.rpartition(":")[2]
        again = await asyncio.create_subprocess_exec(
            *(binary, "--rpc_address=127.0.0.1", f"--rpc_port={port}", "--enable_metric_reporting=false"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            manifest = await patiently(lambda: publisher.publish(2, {"w": array}))
            assert manifest.base is None, "there is no base to build on"
            staged = await patiently(lambda: subscriber.prefetch(2))
            assert staged.manifest == manifest
            assert np.array_equal(staged.staging.array.view(np.float32), array)
        finally:
            again.kill()
            await again.wait()
        await subscriber.close()
        await store.close()


async def patiently(work: Callable[[], Awaitable[Any]]) -> Any:
    """Again until the store has come back: its lender takes a second or two."""
    async with asyncio.timeout(90):
        while True:
            try:
                return await work()
            except StoreError:
                await asyncio.sleep(0.2)


async def test_a_lender_that_dies_is_told() -> None:
    async with MooncakeMaster(segment_bytes=16 << 20) as master:
        store = open_store(master.url())
        publisher = Publisher(store, bucket_bytes=1 << 20)
        await publisher.publish(0, {"w": np.ones(1 << 18, np.float32)})
        os.kill(master.pids[1], signal.SIGKILL)
        async with asyncio.timeout(60):
            with pytest.raises(StoreError, match=r"lender|lend larger segments"):
                await publisher.publish(1, {"w": np.ones(1 << 18, np.float32)})
        await store.close()


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
