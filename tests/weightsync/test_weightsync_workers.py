"""Readers that are killed, missing or stuck; links that are slow: who is well goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from weightsync import (
    FileStore,
    MemoryStore,
    Publisher,
    Subscriber,
    Tensor,
    ThrottledStore,
    VersionTimeout,
    inspect,
)
from weightsync.tensors import Bytes

# Pulls version 1 onto version 0 and commits it, and dies by SIGKILL before the n-th thing it does; for every n, each
# in a forked process and a folder of its own, until one survives.
DOOMED = """
import asyncio, os, signal, sys, threading
import numpy as np
from weightsync import FileStore, Publisher, Subscriber

left = 1 << 30
one = threading.Lock()  # buckets are read side by side, and a process dies of one of them

def step(name):
    global left
    with one:
        left -= 1
        if left < 0:
            open(f"{sys.argv[1]}/stages", "a").write(name + " ")
            os.kill(os.getpid(), signal.SIGKILL)

class Doomed(FileStore):
    def _get(self, key):
        step("get " + key.split(".")[-1])
        return super()._get(key)

    def _put(self, key, parts):
        step("hold")
        super()._put(key, parts)

    def _get_into(self, key, offset, buffer):
        super()._get_into(key, offset, buffer[: buffer.size // 2])
        step("bucket")
        super()._get_into(key, offset, buffer)

    def _delete(self, keys):
        step("release")
        super()._delete(keys)

def load(name, tensor):
    step("load")

async def publish(folder):
    publisher = Publisher(FileStore(folder, durable=False), bucket_bytes=256, encoding=sys.argv[2])
    for version in range(2):
        await publisher.publish(version, {name: np.full(100, version, np.float32) for name in "ab"})

async def pull(folder, count):
    global left
    subscriber = Subscriber(Doomed(folder, durable=False))
    await subscriber.commit(await subscriber.prefetch(0), load)
    left = count
    await subscriber.commit(await subscriber.prefetch(1), load)

count, status = 0, signal.SIGKILL
while status == signal.SIGKILL:
    folder = f"{sys.argv[1]}/{count}"
    asyncio.run(publish(folder))
    child = os.fork()
    if not child:
        asyncio.run(pull(folder, count))
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    count += 1
sys.exit(status)
"""


def ignore(name: str, tensor: Tensor) -> None:
    pass


@pytest.mark.real
@pytest.mark.parametrize("encoding", ["full", "delta"])
async def test_a_subscriber_killed_at_any_stage(tmp_path: Path, encoding: str) -> None:
    """The publisher goes on, what the dead one held is swept, and its successor pulls."""
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", DOOMED, str(tmp_path), encoding)
    assert await child.wait() == 0
    stages = Counter((tmp_path / "stages").read_text().split(" ")[:-1])
    assert stages.keys() == {"get", "manifest", "hold", "bucket", "release", "load"}
    assert stages["bucket"] == 4 and stages["load"] == 2
    for folder in tmp_path.iterdir():
        if folder.is_dir():
            await check_successor(FileStore(folder, durable=False))


async def check_successor(store: FileStore) -> None:
    publisher = Publisher(store, bucket_bytes=256, keep=1, hold_seconds=0)
    weights = {name: np.full(100, 2, np.float32) for name in "ab"}
    manifest = await publisher.publish(2, weights)
    subscriber = Subscriber(store, timeout=10)
    report = await subscriber.commit(await subscriber.prefetch(2), ignore)
    assert report.digest == manifest.digest
    await subscriber.close()
    keys = {"index", "v2.manifest", *(manifest.key(index) for index in range(len(manifest.buckets)))}
    assert set(os.listdir(store.folder)) == keys


WORKER = """
import asyncio, sys
from weightsync import Subscriber, open_store

async def main():
    subscriber = Subscriber(open_store(sys.argv[1]))
    for version in range(int(sys.argv[2]), 5):
        report = await subscriber.commit(await subscriber.prefetch(version, timeout=60), lambda name, tensor: None)
        print(report.digest, flush=True)

asyncio.run(main())
"""


async def worker(folder: Path, first: int) -> asyncio.subprocess.Process:
    command = (sys.executable, "-c", WORKER, f"file:{folder}", str(first))
    return await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)


async def digests(workers: Sequence[asyncio.subprocess.Process]) -> set[str]:
    lines = await asyncio.gather(*(each.stdout.readline() for each in workers if each.stdout))
    return {line.decode().strip() for line in lines}


@pytest.mark.real
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
async def test_half_of_the_workers_down_during_an_update(tmp_path: Path, end: signal.Signals) -> None:
    """Dead or frozen: neither the publisher nor the other half waits; who comes back catches up by the deltas."""
    publisher = Publisher(FileStore(tmp_path, durable=False), bucket_bytes=1024, encoding="delta", keep=2)
    weights = np.zeros(1000, np.float32)
    workers = [await worker(tmp_path, 0) for _ in range(4)]
    try:
        for version in range(5):
            weights[version] = 1
            if version == 2:
                for each in workers[2:]:
                    each.send_signal(end)
            if version == 4:
                await gone(workers[2:])
                workers[2:] = [await worker(tmp_path, 4) for _ in range(2)]
            manifest = await publisher.publish(version, {"w": weights})
            well = workers[:2] if version in (2, 3) else workers
            assert await digests(well) == {manifest.digest}, version
        assert [await each.wait() for each in workers] == [0] * 4
    finally:
        await gone(workers)


async def gone(workers: Sequence[asyncio.subprocess.Process]) -> None:
    for each in workers:
        if each.returncode is None:
            each.kill()
        await each.wait()


class Counting(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.read_bytes = 0

    async def get_into(self, key: str, offset: int, buffer: Bytes) -> None:
        await super().get_into(key, offset, buffer)
        self.read_bytes += buffer.size


async def test_a_slow_store_takes_its_time_and_nothing_is_fetched_twice() -> None:
    """100 MB/s: a pull that runs into its deadline is resumed by the next one."""
    size, rate, bucket = 24 << 20, 100e6, 1 << 20
    store = Counting()
    slow, loop = ThrottledStore(store, rate), asyncio.get_running_loop()
    start = loop.time()
    manifest = await Publisher(slow, bucket_bytes=bucket).publish(0, {"w": np.ones(size, np.uint8)})
    assert loop.time() - start >= size / rate
    subscriber = Subscriber(slow)
    with pytest.raises(VersionTimeout, match="latest is 0"):
        await subscriber.prefetch(0, timeout=0.1)
    assert 0 < store.read_bytes < size
    staged = await subscriber.prefetch(0)
    assert (await subscriber.commit(staged, ignore)).digest == manifest.digest
    # At most the two buckets that were in flight.
    assert store.read_bytes <= size + 2 * bucket
    await subscriber.close()


async def test_a_store_that_is_stuck_ends_a_publication() -> None:
    class Stuck(MemoryStore):
        stuck = True

        async def put(self, key: str, parts: Sequence[Bytes]) -> None:
            if self.stuck and key.startswith("v1."):
                await asyncio.Event().wait()
            await super().put(key, parts)

    store = Stuck()
    publisher, subscriber = Publisher(store, bucket_bytes=256, timeout=0.05), Subscriber(store)
    await publisher.publish(0, {"w": np.zeros(100, np.float32)})
    with pytest.raises(VersionTimeout, match=r"version 1 is not published within 0\.05 s"):
        await publisher.publish(1, {"w": np.ones(100, np.float32)})
    assert await subscriber.latest() == 0 and publisher.stats().publishing is None
    store.stuck = False
    manifest = await publisher.publish(1, {"w": np.ones(100, np.float32)})
    assert (await subscriber.prefetch(1)).manifest == manifest
    assert [info.version for info in await inspect(store)] == [0, 1]
    await subscriber.close()


async def test_stats_tell_what_was_done_and_change_nothing(memory: MemoryStore) -> None:
    publisher, subscriber = Publisher(memory, encoding="delta"), Subscriber(memory)
    weights = np.zeros(1000, np.float32)
    assert publisher.stats().last is None and subscriber.stats().staged is None
    for version in range(3):
        weights[version] = 1
        waiting = asyncio.create_task(subscriber.prefetch(version))
        for _ in range(9):
            await asyncio.sleep(0)
        assert subscriber.stats().pulling == version
        await publisher.publish(version, {"w": weights})
        await subscriber.commit(await waiting, ignore)
    pushed, pulled = publisher.stats(), subscriber.stats()
    assert (pushed.pushes, pushed.content_bytes, pushed.versions) == (3, 3 * 4032, (0, 1, 2))
    assert pushed.last == publisher.pushes[-1] and pushed.publishing is None
    assert pushed.push_seconds == pytest.approx(sum(push.seconds for push in publisher.pushes))
    assert (pulled.pulls, pulled.commits, pulled.refetched) == (3, 3, 0)
    assert pulled.wire_bytes == pushed.wire_bytes < pushed.content_bytes
    assert (pulled.pulling, pulled.staged, pulled.committed) == (None, 2, 2)
    assert pulled.exposed_seconds > 0 and pulled.pull_seconds > 0
    assert (publisher.stats(), subscriber.stats()) == (pushed, pulled)
    await subscriber.close()
