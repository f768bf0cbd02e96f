"""What a version of a small model costs: 0.17 million parameters, one bucket, published to two subscribers.

python benchmarks/weightsync/weightsync_small.py [--quick]

CPU is that of this process, which holds the publisher, both subscribers and their store clients.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import numpy as np
from _results import Row, row, write

from weightsync import Publisher, SharedMemoryStore, Subscriber, Tensor, open_store
from weightsync.mooncake_master import MooncakeMaster

VERSIONS = 30 if "--quick" in sys.argv else 200
# A few milliseconds of CPU, beside an iteration of some seconds.
BOUND_MS = 10.0


class Costs:
    def __init__(self, store: str) -> None:
        self.store = store
        self.found: dict[str, tuple[list[float], list[float]]] = {}

    async def of(self, name: str, work: Callable[[], Awaitable[Any]]) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        result = await work()
        walls, cpus = self.found.setdefault(name, ([], []))
        walls.append(1e3 * (time.perf_counter() - wall))
        cpus.append(1e3 * (time.process_time() - cpu))
        return result

    def rows(self) -> list[Row]:
        found = []
        for name, (walls, cpus) in self.found.items():
            found.append(row(f"{name}, {self.store}", "ms", walls))
            cpu = row(f"{name}, {self.store}, CPU", "ms", cpus, "bound", BOUND_MS)
            found.append({**cpu, "ratio": BOUND_MS / cpu["ours"]})
        return found


async def measure(name: str, url: str) -> list[Row]:
    rng, costs = np.random.default_rng(0), Costs(name)
    weights = {f"layers.{i}.weight": rng.standard_normal(3700).astype(np.float32) for i in range(47)}
    stores = [open_store(url) for _ in range(3)]
    publisher, subscribers = Publisher(stores[0], bucket_bytes=64 << 20), [Subscriber(store) for store in stores[1:]]
    for version in range(VERSIONS):
        for array in weights.values():
            array += 1e-3
        model: dict[str, Any] = {}

        def load(name: str, tensor: Tensor, model: dict[str, Any] = model) -> None:
            model[name] = tensor.numpy().copy()

        await costs.of("publish", partial(publisher.publish, version, weights))
        for subscriber in subscribers:
            staged = await costs.of("pull", partial(subscriber.prefetch, version))
            await costs.of("commit", partial(subscriber.commit, staged, load))
        assert all(np.array_equal(model[name], array) for name, array in weights.items()), "content"
    for subscriber in subscribers:
        await subscriber.close()
    for store in stores:
        await store.close()
    if isinstance(stores[0], SharedMemoryStore):
        stores[0].unlink()
    return costs.rows()


async def main() -> list[Row]:
    rows = await measure("shared memory", f"shm:bench-small-{os.getpid()}")
    async with MooncakeMaster(segment_bytes=64 << 20) as master:
        return rows + await measure("Mooncake", master.url())


if __name__ == "__main__":
    write(__file__, asyncio.run(main()))
