"""What binding costs: beside bare script calls of the same client, and beside Ray placement groups.

python benchmarks/resmgr/resmgr_binding.py [--quick]

One embedded server with 1,000 pools of 8 classes and 10,000 live bindings. The bare script is three commands, called
twice for each bind and release, in turns with ours. A placement group is made, waited for and removed.
"""

from __future__ import annotations

import asyncio
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import redis.asyncio as redis

from resmgr import Binding, Pool, Request, ResourceManager

HERE = Path(__file__).resolve()
QUICK = "--quick" in sys.argv
POOLS, CLASSES, UNITS, LIVE, CLIENTS = 1000, 8, 16, 10_000, 8
ROUNDS, PAIRS = (5, 200) if QUICK else (20, 500)
BARE = """#!lua name=bare
redis.register_function('bare', function(keys)
  redis.call('TIME')
  redis.call('ZINCRBY', keys[1] .. 'z', 1, 'a')
  return redis.call('HSET', keys[1] .. 'h', 'f', 'v')
end)
"""

Row = dict[str, Any]
Work = Callable[[], Awaitable[object]]


def row(
    metric: str, unit: str, ours: list[float], peer: str, theirs: list[float], lower_is_better: bool = True
) -> Row:
    mine, other = statistics.median(ours), statistics.median(theirs)
    return {
        "metric": metric,
        "unit": unit,
        "ours": mine,
        "peer": peer,
        "peer_value": other,
        "published": None,
        "ratio": other / mine if lower_is_better else mine / other,
        "spread": [min(ours), max(ours)],
    }


async def fill(rm: ResourceManager) -> None:
    for number in range(POOLS):
        await rm.register(Pool(f"p{number}", hardware=f"C{number % CLASSES}", total=UNITS))
    for start in range(0, LIVE, 100):
        await asyncio.gather(*(rm.bind(request(n), timeout=0) for n in range(start, start + 100)))


def request(number: int) -> Request:
    return Request("gen", prefer=[f"C{number % CLASSES}"], fallback=[f"C{(number + 1) % CLASSES}"])


async def milliseconds(work: Work, times: int) -> float:
    """The median of so many, one after the other."""
    taken = []
    for _ in range(times):
        begun = time.perf_counter()
        await work()
        taken.append(1000 * (time.perf_counter() - begun))
    return statistics.median(taken)


async def per_second(work: Work, times: int) -> float:
    """From CLIENTS at once."""

    async def client() -> None:
        for _ in range(times):
            await work()

    begun = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return CLIENTS * times / (time.perf_counter() - begun)


async def binding_rows(directory: str) -> list[Row]:
    rows = []
    async with await ResourceManager.connect(f"embedded:{directory}") as rm:
        url = f"unix://{directory}/valkey.sock"
        async with redis.Redis.from_url(url, protocol=2) as client:
            await client.function_load(BARE)
            await fill(rm)
            used = (await client.info("memory"))["used_memory"]

            async def pair() -> None:
                await rm.release(await rm.bind(request(0), timeout=0))

            async def bare() -> None:
                await client.fcall("bare", 1, "bare:")
                await client.fcall("bare", 1, "bare:")

            ours, theirs, fast, bare_fast = [], [], [], []
            for _ in range(ROUNDS):
                ours.append(await milliseconds(pair, PAIRS))
                theirs.append(await milliseconds(bare, PAIRS))
                fast.append(await per_second(pair, PAIRS // 4))
                bare_fast.append(await per_second(bare, PAIRS // 4))
            setting = "1,000 pools, 10,000 live bindings"
            rows.append(row(f"bind + release, p50, {setting}", "ms", ours, "bound", [0.6]))
            rows.append(row("bind + release, p50", "ms", ours, "two bare script calls", theirs))
            rows.append(row(f"bind + release from {CLIENTS} clients", "1/s", fast, "bound", [3000.0], False))
            rows.append(
                row(f"bind + release from {CLIENTS} clients", "1/s", fast, "two bare calls", bare_fast, False)
            )
            rows.append(row("server memory, 10,000 live bindings", "MiB", [used / 2**20], "bound", [64.0]))
            rows.append(await gang_row(rm))
    return [*rows, await ray_row(ours)]


async def gang_row(rm: ResourceManager) -> Row:
    for number in range(8):
        await rm.register(Pool(f"gang{number}", hardware="gang", total=125))
    held: list[Binding] = []

    async def gang() -> None:
        held.append(await rm.bind(Request("gang", prefer=["gang"], amount=1000, gang=True), timeout=0))

    taken = []
    for _ in range(ROUNDS):
        taken.append(await milliseconds(gang, 1))
        await rm.release(held.pop())
    return row("a gang of 1,000 over 8 pools", "ms", taken, "bound", [60.0])


async def ray_row(ours: list[float]) -> Row:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)

    async def group() -> None:
        made = placement_group([{"CPU": 0.1}])
        await made.ready()
        remove_placement_group(made)

    await milliseconds(group, 20)
    theirs = [await milliseconds(group, 100) for _ in range(3)]
    ray.shutdown()
    return row("bind + release, p50", "ms", ours, "Ray placement group: create, ready, remove", theirs)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="resmgr") as directory:
        rows = asyncio.run(binding_rows(directory))
    report = {
        "name": HERE.stem,
        "command": " ".join(["python", "benchmarks/resmgr/resmgr_binding.py", *sys.argv[1:]]),
        "cpu": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "rows": rows,
    }
    for found in rows:
        print(f"{found['metric']}: {found['ours']:.4g} {found['unit']}, {found['peer']} {found['peer_value']:.4g}")
    results = HERE.parents[1] / "results"
    results.mkdir(exist_ok=True)
    (results / f"{HERE.stem}.json").write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


if __name__ == "__main__":
    main()
