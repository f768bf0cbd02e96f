"""The papers' experiments, one function each, giving rows of our value beside the published one.

A batch of the RollArt paper is counted in trajectories: its characterization (a batch of 128 on 32 GPUs trains in
84 s) leaves no room for eight times as many. 128 environments run at once, as many as in the characterization and in
ROLL Flash's agentic runs, where nothing else is said; Sync steps a whole batch together, so it has a batch's worth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from _paper import (
    AGENTIC,
    PARALLEL,
    SWE,
    TO_H20,
    Row,
    beside,
    changed,
    fleet,
    gain_of,
    h800,
    measure,
    over_batched,
    parts_of,
    setup,
)

from rollart.planner.estimate import estimate
from rollart.planner.search import Search
from rollart.simulate.config import make_simulation

Experiment = Callable[[bool], Iterator[Row]]
MODES = ("sync", "sync_plus", "one_off", "areal", "rollart")
BATCH, ENVIRONMENTS = 512, 128
QUICK = 3
"""Iterations of a quick run: the first fills empty queues, and the last commits twice. It has half
the batch and half the environments, so as many trajectories follow one another in each.
"""
MATH = {"GEM-math": AGENTIC["GEM-math"]}


def calibration(quick: bool) -> Iterator[Row]:
    """What the constants were fitted to, and what was held out."""
    whole = measure(
        setup("8B", "sync_plus", [fleet("H800", 32)], h800(32, shared=True), SWE, groups=16, iterations=4)
    )
    parts = whole.summary.parts
    yield beside("fitted: train step, 8B SWE batch 128 on 32 H800", "s", parts["train"], 84.5)
    yield beside("fitted: step, the same", "s", whole.step_s, 365.7, "memory and overhead")
    yield beside("held out: rollout with resets, the same", "s", whole.rollout_s, 281.2)
    for task, published, note in (
        ("FrozenLake", 0.53, "fitted: compute, and the length of moves"),
        ("GEM-math", (1 / 0.79, 1 / 0.49), "held out"),
    ):
        times = [
            measure(
                setup("8B", "sync_plus", [fleet(name, gpus)], h800(32), {task: AGENTIC[task]}, groups=4, iterations=3)
            ).rollout_s
            for name, gpus in (("H800", 2), ("H20", 6))
        ]
        yield beside(f"{task}: time on 2 H800 over time on 6 H20", "ratio", times[0] / times[1], published, note)


def sized(tree: dict[str, Any], environments: int, quick: bool) -> dict[str, Any]:
    """With so many environments, or in a quick run half of them and of the batch."""
    part = 2 if quick else 1
    groups = tree["buffer"]["batch_groups"] // part
    return changed(tree, rollout__concurrency=environments // part, buffer__batch_groups=groups)


def main_setup(model: str, mode: str, quick: bool) -> dict[str, Any]:
    tree = mode_setup(model, mode, QUICK if quick else 6)
    return sized(tree, tree["rollout"]["concurrency"], quick)


def mode_setup(model: str, mode: str, iterations: int = 8) -> dict[str, Any]:
    """The main experiment: 128 GPUs, batch 512."""
    parallel = PARALLEL[model]
    profiles = {**AGENTIC, **(SWE if model == "32B" else {})}
    if mode in ("sync", "sync_plus"):
        fleets, training = [fleet("H800", 128, parallel)], h800(128, shared=True)
    elif mode in ("one_off", "areal"):
        fleets, training = [fleet("H800", 96, parallel)], h800(32)
    else:
        fleets, training = [fleet("H800", 64, parallel), fleet("H20", 32, parallel)], h800(32)
    ours = mode == "rollart"
    tree = setup(
        model,
        mode,
        fleets,
        training,
        profiles,
        groups=64,
        iterations=iterations,
        alpha=1.0 if mode in ("areal", "rollart") else 0.0,
        transport="store" if ours else "broadcast",
        affinity=TO_H20 if ours else None,
    )
    return changed(tree, rollout__concurrency=BATCH if mode == "sync" else ENVIRONMENTS)


def main(model: str, quick: bool) -> Iterator[Row]:
    """Step time and throughput of the five modes."""
    if quick and model != "8B":
        return
    published = {
        ("sync_plus", "sync"): (1.40, 2.40),
        ("one_off", "sync_plus"): (1.31, 1.47),
        ("areal", "one_off"): (1.03, 1.06),
        ("rollart", "areal"): (1.22, 1.36),
        ("rollart", "sync"): (2.65, 4.58),
    }
    runs = {mode: measure(main_setup(model, mode, quick)) for mode in MODES}
    for mode, run in runs.items():
        yield beside(f"{model} {mode}: step time", "s", run.step_s, None, parts_of(run))
    for (better, worse), value in published.items():
        yield beside(f"{model} throughput, {better} over {worse}", "x", gain_of(runs[better], runs[worse]), value)
    if model == "32B":
        for mode, ratio in (("sync_plus", 2.05), ("one_off", 1.35), ("areal", 1.31)):
            yield beside(
                f"32B step time, {mode} over rollart", "x", runs[mode].step_s / runs["rollart"].step_s, ratio
            )


def closed_form(quick: bool) -> Iterator[Row]:
    """The planner's closed form beside the simulation of the main experiment. The lockstep of sync is not in it."""
    for model, mode in (
        ("8B", "sync_plus"),
        ("8B", "one_off"),
        ("8B", "areal"),
        ("8B", "rollart"),
        ("32B", "rollart"),
    ):
        if quick and model != "8B":
            continue
        tree = main_setup(model, mode, quick)
        form, run = estimate(make_simulation(tree)).step, measure(tree)
        yield beside(
            f"{model} {mode}: closed form over simulated step time",
            "ratio",
            form / run.step_s,
            None,
            f"{form:.0f} s, {run.step_s:.0f} s",
        )


def scaling(quick: bool) -> Iterator[Row]:
    """RollArt over Sync+ on 64, 96 and 128 H800, 14B, no affinity."""
    for gpus in (64,) if quick else (64, 96, 128):
        n = QUICK if quick else 6
        plus = setup(
            "14B", "sync_plus", [fleet("H800", gpus, 2)], h800(gpus, shared=True), AGENTIC, groups=64, iterations=n
        )
        ours = setup(
            "14B",
            "rollart",
            [fleet("H800", gpus - 32, 2)],
            h800(32),
            AGENTIC,
            groups=64,
            iterations=n,
            alpha=1.0,
            transport="store",
        )
        both = [measure(sized(tree, ENVIRONMENTS, quick)) for tree in (plus, ours)]
        yield beside(f"14B on {gpus} H800, rollart over sync_plus", "x", gain_of(both[1], both[0]), (1.33, 2.08))


def affinity(quick: bool) -> Iterator[Row]:
    """Mixed classes at equal cost, training fixed on 32 H800."""
    for model in ("8B",) if quick else PARALLEL:
        parallel = PARALLEL[model]
        profiles = {**AGENTIC, **(SWE if model == "32B" else {})}
        runs = {}
        for name, fleets, moved in (
            ("H800 only", [fleet("H800", 72, parallel)], None),
            ("H20 only", [fleet("H20", 208, parallel)], None),
            ("mixed", [fleet("H800", 64, parallel), fleet("H20", 24, parallel)], TO_H20),
        ):
            tree = setup(
                model,
                "rollart",
                fleets,
                h800(32),
                profiles,
                groups=64,
                iterations=QUICK if quick else 6,
                alpha=1.0,
                transport="store",
                affinity=moved,
            )
            runs[name] = measure(sized(tree, ENVIRONMENTS, quick))
        yield beside(f"{model} mixed over H20 only", "x", gain_of(runs["mixed"], runs["H20 only"]), (1.30, 1.68))
        yield beside(f"{model} mixed over H800 only", "x", gain_of(runs["mixed"], runs["H800 only"]), (1.12, 1.37))


def latency(quick: bool) -> Iterator[Row]:
    """Trajectory-level over batch-level rollout as the latency of turns varies: N(10 s, sigma)."""
    for sigma, published in ((10, 2.27),) if quick else ((1, 1.23), (3, 1.51), (5, 1.69), (7, 2.18), (10, 2.27)):
        ratio = over_batched(10.0, sigma, gpus=16, groups=16, iterations=4)
        yield beside(
            f"8B, turn latency N(10, {sigma}): trajectory-level over batch-level rollout", "x", ratio, published
        )


def alphas(quick: bool) -> Iterator[Row]:
    """The best of alpha 2, 4, 6 over alpha 1."""
    for model, published in (("8B", 1.22), ("14B", 1.17), ("32B", 1.14))[: 1 if quick else 3]:
        runs = {}
        for alpha in (1.0, 2.0) if quick else (1.0, 2.0, 4.0, 6.0):
            runs[alpha] = measure(changed(main_setup(model, "rollart", quick), buffer__alpha=alpha))
        best = max(run.summary.tokens_per_s for run in runs.values()) / runs[1.0].summary.tokens_per_s
        words = ", ".join(f"alpha {alpha:g}: {run.step_s:.0f} s" for alpha, run in runs.items())
        yield beside(f"{model} best alpha over alpha 1", "x", best, (1.0, published), words)


def weights(quick: bool) -> Iterator[Row]:
    """Push, accumulated and exposed pull; rates were fitted to 8B (push), TCP (pull), and 8B and 32B (exposed)."""
    published = {
        "8B": (32.4, 6.2, 1.4, 38.6),
        "14B": (67.8, 16.3, 5.1, 84.1),
        "32B": (127.3, 29.7, 9.6, 157.0),
    }
    for model, (push, pull, exposed, naive_s) in published.items():
        tree = mode_setup(model, "rollart", 3)
        small = changed(tree, buffer__batch_groups=8, rollout__concurrency=64)
        run = measure(small).summary
        yield beside(f"{model} push", "s", run.push_s, push, "fitted" if model == "8B" else "held out")
        yield beside(f"{model} accumulated pull", "s", run.pull_s, pull, "held out")
        yield beside(
            f"{model} push and pull, were they waited for", "s", run.push_s + run.pull_s, naive_s, "held out"
        )
        yield beside(f"{model} exposed pull", "s", run.exposed_s, exposed, "held out" if model == "14B" else "fitted")
        if not quick:
            naive = measure(changed(mode_setup(model, "rollart", 6), simulate__transport="broadcast"))
            ours = measure(mode_setup(model, "rollart", 6))
            yield beside(
                f"{model} asynchronous transfer over broadcast, end to end", "x", gain_of(ours, naive), (1.10, 1.16)
            )


def redundancy(quick: bool) -> Iterator[Row]:
    """RollArt's grid: 8B, 32 H800, GEM-math; more members and more groups than the batch of 32 x 8."""
    published = {(8, 34): 1.16, (8, 36): 1.30, (10, 32): 1.11, (10, 34): 1.38, (10, 36): 1.52, (12, 32): 1.24}
    published |= {(12, 34): 1.51, (12, 36): 1.62}
    base = setup("8B", "sync_plus", [fleet("H800", 16)], h800(16), MATH, groups=32, iterations=6)
    plain = measure(base).rollout_s
    for (size, groups), value in list(published.items())[:: 3 if quick else 1]:
        run = measure(changed(base, buffer__spare_members=size - 8, buffer__spare_groups=groups - 32))
        yield beside(f"8B GEM-math, {groups} groups of {size} for 32 of 8", "x", plain / run.rollout_s, value)


def disaggregation(quick: bool) -> Iterator[Row]:
    """Prefill and decode apart: SWE, batch 128, four nodes of eight."""
    published = {
        "32B": {(1, 3): 741.2 / 722.7, (2, 2): 734.9 / 701.6},
        "qwen3-30b-a3b": {(1, 3): 327.4 / 294.8, (2, 2): 305.2 / 251.1},
    }
    for model, cells in list(published.items())[: 1 if quick else 2]:
        parallel = 4 if model == "32B" else 2
        gains = {}
        for prefill, decode in ((1, 3), (2, 2), (3, 1))[: 1 if quick else 3]:
            whole = [fleet("H800", 8 * prefill, parallel), fleet("H20", 8 * decode, parallel)]
            apart = [
                fleet("H800", 8 * prefill, parallel, "prefill"),
                fleet("H20", 8 * decode, parallel, "decode"),
            ]
            runs = [
                measure(setup(model, "sync_plus", fleets, h800(32), SWE, groups=16, iterations=4))
                for fleets in (whole, apart)
            ]
            gains[prefill, decode] = runs[0].rollout_s / runs[1].rollout_s
            yield beside(
                f"{model} {prefill}P{decode}D over colocated",
                "x",
                gains[prefill, decode],
                cells.get((prefill, decode)),
                f"rollout {runs[1].rollout_s:.0f} s" + ("; published: the worst" if decode == 1 else ""),
            )


def serverless(quick: bool) -> Iterator[Row]:
    """Math jobs on 16 H800, 8 of which train: four for generation and four for rewards, or eight and functions."""
    short = {"GEM-math": ("gem-math", 8192, 5)}
    base = setup(
        "8B", "sync_plus", [fleet("H800", 4)], h800(8), short, groups=21, size=4, iterations=5, context=16384
    )
    local = changed(base, simulate__rewards={"kind": "dedicated", "hardware": "H800", "gpus": 4})
    remote = changed(
        base,
        simulate__generation=[fleet("H800", 8)],
        simulate__rewards={"kind": "serverless", "call_s": 0.01, "cold_s": 0.25},
    )
    runs = [measure(tree) for tree in (local, remote)]
    yield beside("rewards on 4 GPUs: utilization", "%", 100 * (runs[0].run.rewards_used or 0), 6.0)
    yield beside("rewards on functions: utilization", "%", 100 * (runs[1].run.rewards_used or 0), 88.0)
    yield beside("rollout, 4 + 4 GPUs over 8 and functions", "x", runs[0].rollout_s / runs[1].rollout_s, 158 / 77)


def planned(quick: bool) -> Iterator[Row]:
    """What the planner makes of the main experiment's devices, beside the paper's use of them: equal cost."""
    if quick:
        return
    plan = Search(mode_setup("8B", "rollart"), width=4, rounds=(5,)).plan([{"H800": 96, "H20": 32}], keep=2)
    best, start = plan.best[0], plan.start
    assert start is not None
    gain = start.summary.step_s / best.summary.step_s
    yield beside("8B planned over the paper's setting", "x", gain, None, f"aim 1.15; {best.candidate.words}")
    before = start
    for name, after in plan.steps:
        gain = before.summary.step_s / after.summary.step_s
        yield beside(f"8B of which {name}", "x", gain, None, f"{after.summary.step_s:.0f} s a step")
        before = after


EXPERIMENTS: dict[str, Experiment] = {
    "calibration": calibration,
    "main_8B": partial(main, "8B"),
    "main_14B": partial(main, "14B"),
    "main_32B": partial(main, "32B"),
    "closed_form": closed_form,
    "scaling": scaling,
    "affinity": affinity,
    "latency": latency,
    "alphas": alphas,
    "weights": weights,
    "redundancy": redundancy,
    "disaggregation": disaggregation,
    "serverless": serverless,
    "planned": planned,
}
