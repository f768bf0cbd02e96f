"""What a Cluster's method call costs beside a bare Ray actor call, and a fan-out beside the hand-written loop.

python benchmarks/resmgr/distributed_calls.py [--quick]

One local Ray. The bare actor has the same methods and is called by `await actor.method.remote(...)`: async methods
only, plain ones only, and both (Ray runs those on its loop then, ours in a thread beside it), one call at a time; the
fan-out is `asyncio.gather` over 16 of them. Ours and theirs take turns in rounds, the order changes from round to
round; every answer is checked.
"""

from __future__ import annotations

import asyncio
import os
import platform
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from rollart.distributed import Cluster, RaySession, Worker, register

HERE = Path(__file__).resolve()
QUICK = "--quick" in sys.argv
FAN = 16
ROUNDS, CALLS, FANS = (7, 150, 12) if QUICK else (25, 200, 20)

Row = dict[str, Any]
Work = Callable[[int], Awaitable[object]]


class Ours(Worker):
    @register("round_robin")
    async def echo(self, value: int) -> int:
        return value

    @register("round_robin")
    def plain(self, value: int) -> int:
        return value

    @register("execute_all")
    async def all(self, value: int) -> int:
        return value


class Plain(Worker):
    @register("round_robin")
    def plain(self, value: int) -> int:
        return value

    @register("execute_all")
    def all(self, value: int) -> int:
        return value


class Bare:
    async def echo(self, value: int) -> int:
        return value

    def plain(self, value: int) -> int:
        return value


class BarePlain:
    def plain(self, value: int) -> int:
        return value


async def timed(work: Work, times: int, expected: Callable[[int], object]) -> float:
    """The median microseconds of one call, each awaited before the next."""
    taken = []
    for number in range(times):
        begun = time.perf_counter()
        answer = await work(number)
        taken.append(1e6 * (time.perf_counter() - begun))
        if answer != expected(number):
            raise SystemExit(f"answered {answer!r} for {number}")
    return statistics.median(taken)


async def side_by_side(ours: Work, bare: Work, times: int, expected: Callable[[int], object]) -> list[list[float]]:
    """Rounds in turns; CPU milliseconds of this process, per call, behind the two lists of microseconds."""
    found: list[list[float]] = [[], [], [], []]
    for work in (ours, bare):
        await timed(work, times, expected)
    for round_ in range(ROUNDS):
        for which, work in sorted(((0, ours), (1, bare)), reverse=bool(round_ % 2), key=lambda pair: pair[0]):
            cpu = time.process_time()
            found[which].append(await timed(work, times, expected))
            found[2 + which].append(1e6 * (time.process_time() - cpu) / times)
    return found


def rows_of(metric: str, found: list[list[float]], peer: str) -> list[Row]:
    """The ratio is the median over rounds of theirs to ours, so that drift of the machine falls out."""
    rows = []
    for name, ours, theirs in ((metric, found[0], found[1]), (f"{metric}, driver's CPU", found[2], found[3])):
        ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
        rows.append(
            {
                "metric": name,
                "unit": "us",
                "ours": statistics.median(ours),
                "peer": peer,
                "peer_value": statistics.median(theirs),
                "published": None,
                "ratio": statistics.median(ratios),
                "spread": [min(ours), max(ours)],
            }
        )
    return rows


async def measure() -> list[Row]:
    import ray
    import ray.cloudpickle

    rows: list[Row] = []
    async with RaySession(cpus=4):
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        both = ray.remote(Bare).options(num_cpus=0.05, max_concurrency=1000).remote()
        plain = ray.remote(BarePlain).options(num_cpus=0.05).remote()
        async with Cluster(Ours, size=1, role="one") as cluster:
            found = await side_by_side(cluster.echo, lambda n: both.echo.remote(n), CALLS, lambda n: n)
            rows += rows_of("a call of an async method", found, "bare Ray actor")
            found = await side_by_side(cluster.plain, lambda n: both.plain.remote(n), CALLS, lambda n: n)
            rows += rows_of("a call of a plain method, beside async ones", found, "bare Ray actor")
            found = await side_by_side(cluster.plain, lambda n: plain.plain.remote(n), CALLS, lambda n: n)
            rows += rows_of("a call of a plain method, beside async ones", found, "bare Ray actor without async ones")
        async with Cluster(Plain, size=1, role="plain") as cluster:
            found = await side_by_side(cluster.plain, lambda n: plain.plain.remote(n), CALLS, lambda n: n)
            rows += rows_of("a call of a plain method", found, "bare Ray actor")
        ray.kill(both)
        ray.kill(plain)
        rows += await fan_rows(Ours, "an async method of", lambda: actors(Bare, max_concurrency=1000), "echo")
        rows += await fan_rows(Plain, "a plain method of", lambda: actors(BarePlain), "plain")
    return rows


def actors(cls: type, **options: int) -> list[Any]:
    import ray

    return [ray.remote(cls).options(num_cpus=0.05, **options).remote() for _ in range(FAN)]


async def fan_rows(cls: type[Worker], what: str, make: Callable[[], list[Any]], method: str) -> list[Row]:
    import ray

    async with Cluster(cls, size=FAN, role=f"many{method}") as cluster:
        many = make()

        async def loop(number: int) -> list[int]:
            return list(await asyncio.gather(*[getattr(actor, method).remote(number) for actor in many]))

        found = await side_by_side(cluster.all, loop, FANS, lambda n: [n] * FAN)
        for actor in many:
            ray.kill(actor)
    return rows_of(f"a call of {what} all of {FAN}", found, "hand-written loop over bare Ray actors")


def main() -> None:
    rows = asyncio.run(measure())
    report = {
        "name": HERE.stem,
        "command": " ".join(["python", "benchmarks/resmgr/distributed_calls.py", *sys.argv[1:]]),
        "cpu": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "rows": rows,
    }
    for row in rows:
        print(
            f"{row['metric']}: {row['ours']:.4g} us, {row['peer']} {row['peer_value']:.4g}, {1 / row['ratio']:.3f}x"
        )
    results = HERE.parents[1] / "results"
    results.mkdir(exist_ok=True)
    (results / f"{HERE.stem}.json").write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


if __name__ == "__main__":
    main()
