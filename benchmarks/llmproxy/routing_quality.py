"""Makespan and prefix-cache hit rate of routing policies on a simulated mixed fleet, in virtual time, on one trace.

python benchmarks/llmproxy/routing_quality.py [--quick] [--seeds 3]

The fleet has H800 and H20 workers with an 8-billion-parameter model each, by roofline. The trace has groups of
trajectories of five tasks that differ in turns, observation and generation lengths and in how long their environments
take; a fixed number runs at a time, as in a rollout, and the next one starts when one ends. Every policy gets the
same trajectories; what it decides is where each turn runs. Ours learns the classes; it is compared with its own form
that is given them, too. The real proxy routes; a run is over when the last trajectory is. A ratio above 1 says how
many times longer the peer's makespan is, or how many times larger our share of context tokens found in a cache.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from statistics import median

import async_solipsism
from msgspec import Struct

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _results import Row, write

from llmproxy import (
    AffinityRouter,
    AutoAffinityRouter,
    CacheAwareRouter,
    GenerateRequest,
    LLMProxy,
    PowerOfTwoRouter,
    RoundRobinRouter,
    Router,
    SimWorker,
    StickyRouter,
)
from llmproxy.sim import H20, H800, Roofline, Shape

QWEN3_8B = Shape(parameters=8.2e9, layers=36, heads=32, kv_heads=8, head_dim=128)
GROUP = 8
CONTEXT = 32_768


class Profile(Struct, frozen=True):
    """A task: turns, tokens of the first prompt, of an observation and of a generation, seconds of a step.

    Lengths are drawn around their medians, log-normally with `spread`.
    """

    turns: tuple[int, int]
    prompt: int
    observation: int
    generation: int
    step: float
    spread: float = 0.5


PROFILES = {
    "SWE": Profile((30, 50), 2_500, 450, 150, 2.0),
    "WebShop": Profile((5, 30), 1_200, 600, 120, 0.5),
    "FrozenLake": Profile((20, 100), 700, 120, 60, 0.05, 0.3),
    "GEM-math": Profile((1, 4), 300, 150, 4_000, 0.5, 0.7),
    "GEM-game": Profile((1, 1), 500, 0, 900, 0.05),
}
AFFINITY = {"WebShop": "H800", "FrozenLake": "H800", "GEM-math": "H20", "GEM-game": "H20"}
"""Where prompts are long against answers, the class that prefills fast, and the reverse; SWE goes anywhere."""


class Turn(Struct, frozen=True):
    observation: list[int]
    tokens: int
    step: float


class Trajectory(Struct, frozen=True):
    id: str
    task: str
    turns: list[Turn]


def make_trace(groups: int, seed: int) -> list[Trajectory]:
    """Groups of all tasks, shuffled. Token ids are unique to a group's prompt and to an observation."""
    random = Random(seed)
    fresh = iter(range(10**9))

    def ids(count: int) -> list[int]:
        start = next(fresh) * CONTEXT
        return list(range(start, start + count))

    def length(around: int, spread: float) -> int:
        return max(1, int(around * math.exp(random.gauss(0.0, spread)))) if around else 0

    trace = []
    for task, profile in PROFILES.items():
        for group in range(groups):
            prompt = ids(length(profile.prompt, profile.spread))
            for member in range(GROUP):
                turns: list[Turn] = []
                total = 0
                for at in range(random.randint(*profile.turns)):
                    observation = prompt if at == 0 else ids(length(profile.observation, profile.spread))
                    tokens = length(profile.generation, profile.spread)
                    total += len(observation) + tokens
                    if total > CONTEXT:
                        break
                    turns.append(Turn(observation, tokens, profile.step * math.exp(random.gauss(0.0, 0.5))))
                trace.append(Trajectory(f"{task}-{group}-{member}", task, turns))
    random.shuffle(trace)
    return trace


def make_fleet(h800: int, h20: int, length: Callable[[GenerateRequest], int]) -> list[SimWorker]:
    devices = [H800] * h800 + [H20] * h20
    return [
        SimWorker(
            f"{device.name}-{i}",
            hardware=device.name,
            speed=Roofline(device, QWEN3_8B),
            context_limit=2 * CONTEXT,
            share_prompts=True,
            length=length,
        )
        for i, device in enumerate(devices)
    ]


class Outcome(Struct, frozen=True):
    makespan: float
    hit_rate: float
    turns: int
    cpu: float
    preemptions: int
    router: dict[str, int]


def play(trace: list[Trajectory], h800: int, h20: int, concurrent: int, router: Router) -> Outcome:
    lengths: dict[str, int] = {}
    workers = make_fleet(h800, h20, lambda request: lengths[request.request_id])
    seen = cached = turns = 0

    async def run(proxy: LLMProxy, trajectory: Trajectory) -> None:
        nonlocal seen, cached, turns
        context: list[int] = []
        for at, turn in enumerate(trajectory.turns):
            context = context + turn.observation
            id = f"{trajectory.id}/{at}"
            lengths[id] = turn.tokens
            # As in a run, the budget is what the context has room for; how long a generation gets is not known.
            budget = min(8_192, 2 * CONTEXT - len(context))
            request = GenerateRequest(trajectory.id, context, budget, task=trajectory.task, request_id=id)
            result = await proxy.generate(request)
            seen += len(context)
            cached += result.timing.cached_tokens
            turns += 1
            context = context + result.token_ids
            await asyncio.sleep(turn.step)

    async def slot(proxy: LLMProxy, waiting: Iterator[Trajectory]) -> None:
        for trajectory in waiting:
            await run(proxy, trajectory)

    async def run_all() -> tuple[float, dict[str, int]]:
        proxy = LLMProxy(workers, router=router)
        waiting = iter(trace)
        await asyncio.gather(*(slot(proxy, waiting) for _ in range(concurrent)))
        now = asyncio.get_running_loop().time()
        stats = proxy.stats().router
        await proxy.close()
        return now, stats

    start = time.process_time()
    with asyncio.Runner(loop_factory=async_solipsism.EventLoop) as runner:
        makespan, stats = runner.run(run_all())
    assert turns == sum(len(trajectory.turns) for trajectory in trace)
    preemptions = sum(worker.preemptions for worker in workers)
    return Outcome(makespan, cached / seen, turns, time.process_time() - start, preemptions, stats)


def policies(seed: int) -> dict[str, Callable[[], Router]]:
    return {
        "AutoAffinityRouter": lambda: AutoAffinityRouter(random=Random(seed)),
        "AffinityRouter, its map given": lambda: AffinityRouter(AFFINITY, random=Random(seed)),
        "round robin": RoundRobinRouter,
        "power of two": lambda: PowerOfTwoRouter(Random(seed)),
        "cache-aware": lambda: CacheAwareRouter(random=Random(seed)),
        "sticky-least-loaded": lambda: StickyRouter(Random(seed)),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--groups", type=int)
    parser.add_argument("--fleet", type=int, nargs=2)
    parser.add_argument("--concurrent", type=int)
    options = parser.parse_args()
    groups = options.groups or (6 if options.quick else 24)
    # An H800 costs 2.85 times an H20: about as much is spent on either class.
    h800, h20 = options.fleet or ((2, 6) if options.quick else (4, 12))
    concurrent = options.concurrent or 24 * (h800 + h20)
    outcomes: dict[str, list[Outcome]] = {}
    for seed in range(options.seeds or (1 if options.quick else 3)):
        trace = make_trace(groups, seed)
        for name, make in policies(seed).items():
            outcome = play(trace, h800, h20, concurrent, make())
            outcomes.setdefault(name, []).append(outcome)
            print(
                f"{name:30} {outcome.makespan:8.1f} s  hits {outcome.hit_rate:.3f}  turns {outcome.turns}"
                f"  {1e6 * outcome.cpu / outcome.turns:.0f} us/turn  preempted {outcome.preemptions}"
                f"  {outcome.router}",
                file=sys.stderr,
            )
    ours = outcomes.pop("AutoAffinityRouter")
    rows = []
    for peer, theirs in outcomes.items():
        spans = [one.makespan for one in ours]
        rates = [one.hit_rate for one in ours]
        ratios = [their.makespan / our.makespan for their, our in zip(theirs, ours, strict=True)]
        rows.append(Row.against("makespan", "s", spans, peer, median(one.makespan for one in theirs), less=True))
        rows[-1].ratio, rows[-1].spread = median(ratios), [min(ratios), max(ratios)]
        rows.append(Row.against("cache_hit_rate", "fraction", rates, peer, median(one.hit_rate for one in theirs)))
    everything = [one for many in [ours, *outcomes.values()] for one in many]
    spent = [1e6 * one.cpu / one.turns for one in everything]
    rows.append(
        Row(metric="cpu_us_per_simulated_turn", unit="us", ours=median(spent), spread=[min(spent), max(spent)])
    )
    write(Path(__file__), rows, options.quick)


if __name__ == "__main__":
    main()
