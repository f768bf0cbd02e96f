"""What trajectory-level rollout and redundancy buy, on virtual time; what the scheduler costs, on real time.

python benchmarks/envmanager/envmanager_rollout.py [--quick]

Virtual part: the real scheduler on a virtual-time loop. Every turn is 0.5 s of generation and a step of N(10 s,
sigma) clipped at 0; `peer` is the same scheduler at batch level, where each turn waits for all, or without
redundancy. Published: RollArt (trajectory-level table, redundancy on GEM-math) and ROLL Flash (batch 512; 256
rollouts), whose episode lengths are not stated.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import async_solipsism
import msgspec
from _trivial import Counting

from envmanager import (
    Action,
    Barrier,
    Episode,
    LatencyEnv,
    Limits,
    LocalGroups,
    RolloutScheduler,
    collect,
    nonblocking,
)

T = TypeVar("T")
HERE = Path(__file__).resolve()
QUICK = "--quick" in sys.argv
TURNS = 20
GENERATE_S = 0.5
SLOW, STOPPED = 0.02, 0.01  # shares of environments that are 20 times slower, and that never answer
NO_DEADLINES = Limits(step_timeout=None, turn_timeout=None, episode_timeout=None)

Row = dict[str, Any]


class Generating:
    """Answers after a while of the loop's time, or at once."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    async def act(self, episode: Episode) -> Action:
        await asyncio.sleep(self.seconds)
        return Action(text="a", token_ids=[1], logprobs=[-1.0], prompt_ids=[1])


def virtual(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=async_solipsism.EventLoop) as runner:
        return runner.run(work)


def latent(sigma: float, seed: int, turns: int, failing: bool = False, mean: float = 10.0) -> Callable[[str], Any]:
    """Makes environments with latency, each from a random source of its own; some fail slow or stop, where asked."""
    rng = random.Random(seed)

    @nonblocking
    def make_env(key: str) -> LatencyEnv:
        fate = rng.random() if failing else 1.0
        scale = 1e6 if fate < STOPPED else 20.0 if fate < STOPPED + SLOW else 1.0
        return LatencyEnv(Counting(turns), mean * scale, sigma * scale, rng.getrandbits(32))

    return make_env


async def batch(make_env: Callable[[str], Any], groups: int, size: int, barrier: Barrier | None) -> float:
    """Seconds until all of the batch are there."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    source = LocalGroups([f"k{n}" for n in range(groups)], group_size=size)
    policy = Generating(GENERATE_S)
    options: dict[str, Any] = {"concurrency": groups * size, "limits": NO_DEADLINES, "barrier": barrier}
    await RolloutScheduler(make_env, policy, source, **options).run()
    return loop.time() - began


async def redundant(make_env: Callable[[str], Any], groups: int, size: int, limits: Limits) -> float:
    """Seconds until 32 groups of 8 are there, of so many started."""
    options: dict[str, Any] = {"spare_groups": groups - 32, "spare_members": size - 8, "concurrency": groups * size}
    keys = [f"k{n}" for n in range(groups)]
    done = await collect(make_env, Generating(GENERATE_S), keys, group_size=8, limits=limits, **options)
    return done.seconds


def compared(metric: str, ours: list[float], theirs: list[float], peer: str, published: float | None) -> Row:
    ratios = sorted(b / a for a, b in zip(ours, theirs, strict=True))
    return {
        "metric": metric,
        "unit": "s (virtual)",
        "ours": statistics.median(ours),
        "peer": peer,
        "peer_value": statistics.median(theirs),
        "published": published,
        "ratio": statistics.median(ratios),
        "spread": [ratios[0], ratios[-1]],
    }


def levels(seeds: range) -> list[Row]:
    rows = []
    for sigma, published in ((1, 1.23), (3, 1.51), (5, 1.69), (7, 2.18), (10, 2.27)):
        ours = [virtual(batch(latent(sigma, seed, TURNS), 64, 8, None)) for seed in seeds]
        theirs = [virtual(batch(latent(sigma, seed, TURNS), 64, 8, Barrier())) for seed in seeds]
        rows.append(compared(f"trajectory-level, batch 512, N(10, {sigma})", ours, theirs, "batch level", published))
    return [*rows, rows[-1] | {"metric": f"{rows[-1]['metric']}, beside ROLL Flash", "published": 2.46}]


def redundancy(seeds: range) -> list[Row]:
    """GEM-math stands for few turns with a heavy tail; the other for 256 rollouts where environments fail."""
    rows = []
    published = {32: (1.0, 1.11, 1.24), 34: (1.16, 1.38, 1.51), 36: (1.3, 1.52, 1.62)}
    plain = [virtual(redundant(latent(5, seed, 3), 32, 8, NO_DEADLINES)) for seed in seeds]
    for groups, values in published.items():
        for size, value in zip((8, 10, 12), values, strict=True):
            ours = [virtual(redundant(latent(5, seed, 3), groups, size, NO_DEADLINES)) for seed in seeds]
            rows.append(compared(f"redundancy {groups}x{size}, 3 turns, N(10, 5)", ours, plain, "32x8", value))
    limits = Limits(step_timeout=120.0, turn_timeout=None, episode_timeout=None)
    plain = [virtual(redundant(latent(5, seed, 3, failing=True), 32, 8, limits)) for seed in seeds]
    for groups, size, value in [(36, 9, 3.1), (36, 11, 5.24), (36, 12, 5.45)]:
        ours = [virtual(redundant(latent(5, seed, 3, failing=True), groups, size, limits)) for seed in seeds]
        metric = f"redundancy {groups}x{size}, 3 turns, N(10, 5), 2 % slow, 1 % stopped, killed after 120 s"
        rows.append(compared(metric, ours, plain, "32x8", value))
    return rows


def measured(metric: str, unit: str, values: list[float], bound: float | None = None) -> Row:
    """`bound` is the most that the value may be; the ratio says how far below it stays."""
    ours = statistics.median(values)
    return {
        "metric": metric,
        "unit": unit,
        "ours": ours,
        "peer": "bound" if bound else None,
        "peer_value": bound,
        "published": None,
        "ratio": bound / ours if bound else None,
        "spread": [min(values), max(values)],
    }


def resident_kib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024


async def crowd(count: int, turns: int) -> tuple[float, float]:
    """CPU us a turn, and KiB an episode, of so many concurrent episodes that all generate at once."""
    gc.collect()
    before, most = resident_kib(), 0.0

    class Parking(Generating):
        async def act(self, episode: Episode) -> Action:
            nonlocal most
            arrived.add(episode.id)
            if len(arrived) == count and not everyone.is_set():
                most = resident_kib()
                everyone.set()
            await everyone.wait()
            return await super().act(episode)

    arrived: set[str] = set()
    everyone = asyncio.Event()
    began = time.process_time()
    keys = [f"k{n}" for n in range(count)]
    await collect(nonblocking(lambda key: Counting(turns)), Parking(0.0), keys, concurrency=count)
    return (time.process_time() - began) / (count * turns) * 1e6, (most - before) / count


def costs(repeats: int) -> list[Row]:
    count = 10_000
    runs = [asyncio.run(crowd(count, 10)) for _ in range(repeats)]
    return [
        measured(
            f"CPU, {count} concurrent episodes, trivial environment", "us a turn", [run[0] for run in runs], 60.0
        ),
        measured(f"memory, {count} concurrent episodes", "KiB each", [runs[0][1]], 24.0),
    ]


def main() -> None:
    logging.getLogger("envmanager").setLevel(logging.ERROR)  # failures are part of the measurement
    seeds = range(1 if QUICK else 3)
    rows = [*costs(1 if QUICK else 3), *levels(seeds), *redundancy(range(3 if QUICK else 6))]
    command = f"python benchmarks/envmanager/{HERE.name}" + (" --quick" if QUICK else "")
    cpu = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    result = {"name": HERE.stem, "command": command, "cpu": cpu, "rows": rows}
    out = HERE.parents[1] / "results" / f"{HERE.stem}.json"
    out.parent.mkdir(exist_ok=True)
    out.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
    for row in rows:
        print(f"{row['metric']}: {row['ours']:.4g} {row['unit']}, ratio {row['ratio'] or float('nan'):.3g}")


if __name__ == "__main__":
    main()
