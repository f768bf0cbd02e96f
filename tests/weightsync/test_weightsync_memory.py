"""Host memory beyond the model: two buckets for a publisher (deltas: and a snapshot), for a subscriber one model too.

Measured twice: what Python allocates, to the byte, and the peak of the resident memory of a process of its own. What
a shared-memory store maps is the store's, and stands in every process that has touched it.
"""

from __future__ import annotations

import asyncio
import sys
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from weightsync import FileStore, Publisher, Subscriber
from weightsync.mooncake_master import MooncakeMaster

pytestmark = pytest.mark.seconds

MIB = 1 << 20
MODEL, BUCKET = 24 * MIB, 12 * MIB
# What does not grow with the buckets: masks, positions, thread stacks.
WORK = MIB


def weights(strided: bool) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {f"w{number}": np.zeros(3 * MIB, np.uint8) for number in range(8)}
    if strided:
        found["w0"] = np.zeros((2 * MIB, 3), np.uint8)[:, 0]
        found["w1"] = np.zeros((1000, 3000), np.uint8).T
        # One row that is larger than a bucket.
        found["w2"] = np.zeros((1, 15 * MIB, 2), np.uint8)[..., 0]
        for number in range(3, 7):
            del found[f"w{number}"]
    return found


@pytest.mark.parametrize(("encoding", "snapshot"), [("full", 0), ("delta", MODEL)])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("percent", [1, 20, 100])
async def test_peaks(
    tmp_path: Path, encoding: Literal["full", "delta"], snapshot: int, strided: bool, percent: int
) -> None:
    """However much changes between versions."""
    store, rng = FileStore(tmp_path, durable=False), np.random.default_rng(0)
    model = weights(strided)
    publisher, subscriber = Publisher(store, bucket_bytes=BUCKET, encoding=encoding), Subscriber(store)
    for version in range(3):
        for array in model.values():
            array ^= rng.integers(0, 100, array.shape, dtype=np.uint8) < percent
        tracemalloc.start()
        await publisher.publish(version, model)
        held, published = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        staged = await subscriber.prefetch(version)
        await subscriber.commit(staged, lambda name, tensor: None)
        pulled = tracemalloc.get_traced_memory()[1] - held
        tracemalloc.stop()
        # The snapshot is made by the first publication; staging is memory of its own, one model, and not counted.
        assert published <= (0 if version else snapshot) + 2 * BUCKET + WORK, version
        assert pulled <= 2 * BUCKET + WORK, version
    await subscriber.close()


# Prints by how many bytes the resident memory of this process has grown at its peak.
PROCESS = """
import asyncio, gc, sys
import numpy as np
from weightsync import Publisher, Subscriber, open_store

MIB = 1 << 20

def resident(field):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(field))

def model():
    found = {f"w{number}": np.ones(3 * MIB, np.float16) for number in range(4)}
    if sys.argv[3] == "strided":
        found["w0"] = np.ones((1, 3 * MIB, 2), np.float16)[..., 0]
        found["w1"] = np.ones((2000, 1500), np.float16).T
    return found

async def main():
    role, url, encoding = sys.argv[1], sys.argv[2], sys.argv[4]
    store, small = open_store(url), open_store(f"{url}-{role}")
    await Publisher(small).publish(0, {"w": np.ones(1)})
    await Subscriber(small).prefetch(0)
    publisher, subscriber = Publisher(store, bucket_bytes=4 * MIB, encoding=encoding), Subscriber(store)
    weights = model() if role == "publisher" else {}
    gc.collect()
    open("/proc/self/clear_refs", "w").write("5")
    before = resident("VmRSS")
    for version in range(3):
        if weights:
            for number, array in enumerate(weights.values()):
                array[..., version :: 50 - number] = version
            await publisher.publish(version, weights)
        else:
            staged = await subscriber.prefetch(version)
            await subscriber.commit(staged, lambda name, tensor: None)
        print(resident("VmHWM") - before, flush=True)
        sys.stdin.readline()

asyncio.run(main())
"""


@pytest.fixture(params=["file", pytest.param("mooncake", marks=pytest.mark.slow)])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    if request.param == "file":
        yield f"file:{tmp_path}/store"
        return
    async with MooncakeMaster(segment_bytes=5 * MODEL) as master:
        yield master.url("store")


async def start(role: str, url: str, layout: str, encoding: str) -> asyncio.subprocess.Process:
    command, pipe = (sys.executable, "-c", PROCESS, role, url, layout, encoding), asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)


async def step(process: asyncio.subprocess.Process) -> int:
    assert process.stdin and process.stdout
    grown = int(await process.stdout.readline())
    process.stdin.write(b"\n")
    return grown


@pytest.mark.real
@pytest.mark.parametrize("encoding", ["full", "delta"])
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
async def test_resident_memory(place: str, layout: str, encoding: str) -> None:
    bucket = 4 * MIB
    publisher, subscriber = [await start(role, place, layout, encoding) for role in ("publisher", "subscriber")]
    try:
        for _ in range(3):
            published, pulled = await step(publisher), await step(subscriber)
            assert published <= (MODEL if encoding == "delta" else 0) + 2 * bucket + WORK
            assert pulled <= MODEL + 2 * bucket + WORK
        assert [await publisher.wait(), await subscriber.wait()] == [0, 0]
    finally:
        for process in (publisher, subscriber):
            if process.returncode is None:
                process.kill()
                await process.wait()
