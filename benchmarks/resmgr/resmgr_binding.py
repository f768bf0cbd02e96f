"""What binding costs: beside bare script calls of redis-py, and beside Ray placement groups.

python benchmarks/resmgr/resmgr_binding.py [--quick]

One embedded server with 1,000 pools of 8 classes and 10,000 live bindings. The bare script is three commands, called
twice by redis-py for each bind and release, in turns with ours. "8 clients" are measured twice: as 8 tasks of one
manager, whose calls share a connection, and as 8 processes with a manager each, where every call is a message of its
own. A placement group is made, waited for and removed. What was granted is checked.
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

from resmgr import Node, Pool, Request, ResourceManager

HERE = Path(__file__).resolve()
QUICK = "--quick" in sys.argv
CLIENT = sys.argv[sys.argv.index("--client") + 1 :] if "--client" in sys.argv else []
POOLS, CLASSES, UNITS, LIVE, CLIENTS = 1000, 8, 16, 10_000, 8
WINDOW_S = 1.5 if QUICK else 4.0
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

            found: list[list[float]] = [[] for _ in range(8)]
            ours, theirs, fast, bare_fast, cpu, bare_cpu, many, bare_many = found
            for _ in range(ROUNDS):
                ours.append(await milliseconds(pair, PAIRS))
                theirs.append(await milliseconds(bare, PAIRS))
                for rates, burnt, work in ((fast, cpu, pair), (bare_fast, bare_cpu, bare)):
                    before = time.process_time()
                    rates.append(await per_second(work, PAIRS // 2))
                    burnt.append(1e6 * (time.process_time() - before) / (CLIENTS * (PAIRS // 2)))
            for _ in range(2 if QUICK else 5):
                many.append(await from_processes("ours", url))
                bare_many.append(await from_processes("bare", url))
            setting = "1,000 pools, 10,000 live bindings"
            rows.append(row(f"bind + release, p50, {setting}", "ms", ours, "bound", [0.6]))
            rows.append(row("bind + release, p50", "ms", ours, "two bare script calls", theirs))
            for how, mine, other in (("tasks", fast, bare_fast), ("processes", many, bare_many)):
                metric = f"bind + release from {CLIENTS} clients ({how})"
                rows.append(row(metric, "1/s", mine, "bound", [3000.0], False))
                rows.append(row(metric, "1/s", mine, "two bare script calls", other, False))
            metric = f"bind + release from {CLIENTS} clients (tasks), the client's CPU"
            rows.append(row(metric, "us", cpu, "two bare script calls", bare_cpu))
            rows.append(row("server memory, 10,000 live bindings", "MiB", [used / 2**20], "bound", [64.0]))
            rows += await gang_rows(rm)
    return [*rows, await ray_row(ours)]


async def from_processes(whose: str, url: str) -> float:
    """Pairs a second of CLIENTS processes; all count for WINDOW_S seconds from when the last of them is ready."""
    command, pipe = [sys.executable, str(HERE), "--client", whose, url], asyncio.subprocess.PIPE
    processes = [await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe) for _ in range(CLIENTS)]
    for process in processes:
        assert process.stdout is not None
        await process.stdout.readline()
    counts = [process.communicate(b"go\n") for process in processes]
    return sum(int(out) for out, _ in await asyncio.gather(*counts)) / WINDOW_S


async def client(whose: str, url: str) -> int:
    """One of the processes."""
    if whose == "bare":
        async with redis.Redis.from_url(url, protocol=2) as bare:

            async def calls() -> None:
                await bare.fcall("bare", 1, "bare:")
                await bare.fcall("bare", 1, "bare:")

            return await counted(calls)
    async with await ResourceManager.connect(url) as rm:

        async def pair() -> None:
            await rm.release(await rm.bind(request(os.getpid()), timeout=0))

        return await counted(pair)


async def counted(work: Work) -> int:
    await work()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    count, begun = 0, time.perf_counter()
    while time.perf_counter() < begun + WINDOW_S:
        await work()
        count += 1
    return count


async def gang_rows(rm: ResourceManager) -> list[Row]:
    """1,000 units of 8 pools in one request; and, the harder one, 1,000 nodes of their own over 8 pools."""
    for number in range(8):
        await rm.register(Pool(f"gang{number}", hardware="gang", total=125))
        nodes = [Node(f"n{number}-{i}", 1) for i in range(125)]
        await rm.register(Pool(f"wide{number}", hardware="wide", nodes=nodes))
    rows = []
    for what, hardware, places in (("1,000 units of 8 pools", "gang", 8), ("1,000 nodes of 8 pools", "wide", 1000)):
        wanted = Request("gang", prefer=[hardware], amount=1000, gang=True, spread=hardware == "wide")
        binds: list[float] = []
        pairs: list[float] = []
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            binding = await rm.bind(wanted, timeout=0)
            bound = time.perf_counter()
            await rm.release(binding)
            pairs.append(1000 * (time.perf_counter() - begun))
            binds.append(1000 * (bound - begun))
            if len(binding.allocations) != places or sum(a.amount for a in binding.allocations) != 1000:
                raise SystemExit(f"granted {binding.amount} on {len(binding.allocations)} places")
        rows.append(row(f"a gang of {what}, bind", "ms", binds, "bound", [60.0]))
        rows.append(row(f"a gang of {what}, bind + release", "ms", pairs, "bound", [60.0]))
    return rows


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
    if CLIENT:
        print(asyncio.run(client(*CLIENT)))
        return
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
