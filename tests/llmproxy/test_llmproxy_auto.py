"""The learned affinity ends where an exhaustive search would, and stays there."""

from __future__ import annotations

import asyncio
from itertools import product
from random import Random

import async_solipsism
import pytest

from llmproxy import AffinityRouter, AutoAffinityRouter, GenerateRequest, LLMProxy, Router, SimWorker
from llmproxy.routing.auto import Costs, Fit, Model, Share
from llmproxy.sim import H20, H800, Roofline, Shape

SHAPE = Shape(parameters=8.2e9, layers=36, heads=32, kv_heads=8, head_dim=128)
TASKS = {"reader": (6_000, 30), "writer": (60, 1_200), "both": (600, 500)}


def makespan(router: Router, *, trajectories: int = 900, seed: int = 0, sizes: tuple[int, int] = (4, 4)) -> float:
    """Single turns of all tasks, a fixed number at a time, on a fleet of two classes."""
    devices = [H800] * sizes[0] + [H20] * sizes[1]
    workers = [SimWorker(f"w{i}", hardware=one.name, speed=Roofline(one, SHAPE)) for i, one in enumerate(devices)]
    random = Random(seed)
    trace = [random.choice(list(TASKS)) for _ in range(trajectories)]

    async def lane(proxy: LLMProxy, waiting: enumerate[str]) -> None:
        for number, task in waiting:
            prompt, tokens = (max(1, int(around * random.uniform(0.6, 1.4))) for around in TASKS[task])
            await proxy.generate(GenerateRequest(f"t{number}", [number] * prompt, tokens, task=task))

    async def play() -> float:
        proxy = LLMProxy(workers, router=router)
        waiting = enumerate(trace)
        await asyncio.gather(*(lane(proxy, waiting) for _ in range(96)))
        await proxy.close()
        return asyncio.get_running_loop().time()

    with asyncio.Runner(loop_factory=async_solipsism.EventLoop) as runner:
        return runner.run(play())


@pytest.mark.seconds
def test_it_converges_to_the_assignment_with_the_least_makespan_and_does_not_flap() -> None:
    fixed = {}
    for names in product(("H800", "H20"), repeat=len(TASKS)):
        affinity = dict(zip(TASKS, names, strict=True))
        fixed[names] = makespan(AffinityRouter(affinity, random=Random(0)))
    best = min(fixed, key=fixed.__getitem__)
    router = AutoAffinityRouter(random=Random(0), review=128)
    took = makespan(router)
    assert tuple(router.assignment[task] for task in TASKS) == best, (router.assignment, fixed)
    assert took < 1.15 * fixed[best] and took < 0.8 * sorted(fixed.values())[len(fixed) // 2]
    settled = router.stats()["changes"]
    assert settled <= 2
    for seed in range(1, 4):
        makespan(router, seed=seed)
    assert router.stats()["changes"] == settled


def test_it_follows_the_fleet() -> None:
    """With hardly any workers that are good at it, a task goes where there are some."""
    router = AutoAffinityRouter(random=Random(0), review=128)
    makespan(router, sizes=(4, 4))
    assert router.assignment["writer"] == "H20"
    makespan(router, sizes=(12, 1), trajectories=1_800)
    assert router.assignment["writer"] == "H800"


def test_the_fit_recovers_the_costs_and_forgets_old_ones() -> None:
    random = Random(0)
    fit = Fit()
    for costs in (Costs(1e-4, 2e-2, 1e-3), Costs(5e-4, 1e-2, 2e-3)):
        for _ in range(5_000):
            p, d, n = random.uniform(0, 5_000), random.uniform(1, 500), random.uniform(1, 30)
            fit.add(p, d, n, (costs.prefill * p + d * (costs.step + costs.member * n)) * random.uniform(0.9, 1.1))
        assert fit.costs() == pytest.approx(costs, rel=0.1)
    assert Fit().costs() == (0.0, 0.0, 0.0)


def test_the_flow_is_bound_by_what_is_in_flight_then_by_the_busiest_class() -> None:
    mix = {"t": Share(0.5, 1_000.0, 0.0), "u": Share(0.5, 0.0, 100.0)}
    costs = {"a": Costs(1e-3, 1e-2, 1e-3), "b": Costs(1e-2, 1e-2, 1e-4)}
    apart = {"t": "a", "u": "b"}
    few, many = (Model(mix, costs, {"a": 2, "b": 2}, in_flight) for in_flight in (0.01, 1e6))
    assert few.flow(apart) == pytest.approx(0.01 / (0.5 * 1.0 + 0.5 * 1.01), rel=0.01)
    assert many.flow(apart) == pytest.approx(2 / (0.5 * 1.0), rel=0.01)
    assert many.best() == apart and many.flow({"t": "b", "u": "b"}) < many.flow(apart)


@pytest.mark.parametrize("tasks", [3, 12])
def test_the_best_assignment_is_found_or_nearly(tasks: int) -> None:
    random = Random(tasks)
    mix = {f"t{i}": Share(1 / tasks, random.uniform(10, 5_000), random.uniform(10, 500)) for i in range(tasks)}
    model = Model(mix, {"a": Costs(1e-5, 1e-2, 1e-3), "b": Costs(1e-4, 1e-2, 3e-4)}, {"a": 2, "b": 3}, 200.0)
    options = [dict(zip(mix, chosen, strict=True)) for chosen in product("ab", repeat=tasks)]
    assert model.flow(model.best()) >= 0.95 * max(map(model.flow, options))
