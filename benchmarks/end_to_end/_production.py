"""The RollArt paper's production run: faults at that size, and what its retuning gained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from _experiments import QUICK, Experiment
from _paper import AGENTIC, SWE, Row, beside, changed, fleet, h800, measure, parts_of, setup

from rollart.planner.search import Search


def production(iterations: int, groups: int = 256, **changes: Any) -> dict[str, Any]:
    """The paper's production run: over 3,000 GPUs, one in six of which trains, alpha 1, a large mixture of experts,
    prompts to 12k and responses to 46k; tasks of 1 to 48 turns. Each of the trainer's nodes pushes its part of the
    weights; there is an environment for every fourth trajectory of a batch, as in the main experiment.
    """
    trains = round(3008 / 6 / 8) * 8
    profiles = {**SWE, **AGENTIC, "Think": ("rlvr-think", 30720, 1)}
    tree = setup(
        "qwen3-235b-a22b",
        "rollart",
        [fleet("H800", 3008 - trains, 8)],
        h800(trains) | {"push_streams": trains // 8},
        profiles,
        groups=groups,
        iterations=iterations,
        alpha=1.0,
        transport="store",
        context=65536,
    )
    return changed(tree, rollout__concurrency=2 * groups, **changes)


def faults(quick: bool) -> Iterator[Row]:
    """The production run with lost nodes, slow links and an environment storm."""
    n, groups = (3, 32) if quick else (5, 256)
    plain = measure(production(n, groups=groups))
    waits = plain.summary.parts.get("get_batch", 0.0) / plain.step_s
    yield beside("3,008 GPUs, 1 : 5: get_batch waits, part of a step", "%", 100 * waits, (0.0, 62.0), parts_of(plain))
    if quick:
        return
    cases = {
        "4 nodes lost": {"kind": "node", "count": 4},
        "links at a tenth": {"kind": "link", "factor": 0.1},
        "environment storm": {"kind": "environments", "factor": 0.5, "slow": 4.0},
    }
    for name, fault in cases.items():
        timed = [{**fault, "at": plain.step_s * n / 2, "for_s": plain.step_s}]
        hit = measure(production(n, groups=groups, simulate__faults=timed))
        yield beside(f"3,008 GPUs, {name} for a step", "x slower", hit.run.elapsed_s / plain.run.elapsed_s, None)


def retuning(quick: bool) -> Iterator[Row]:
    """The production run without a prefix cache, with it, and with what the planner makes of its devices; then the
    same cache where engines are full, with as many environments as the buffer has room for.
    """
    n, groups = (QUICK, 32) if quick else (5, 256)
    base = production(n, groups=groups)
    start = measure(changed(base, simulate__prefix_cache=False))
    yield beside("3,008 GPUs, 1 : 5, no prefix cache: step time", "s", start.step_s, None, parts_of(start))
    cached = measure(base)
    yield beside("3,008 GPUs, prefix cache", "x", start.step_s / cached.step_s, None, f"{cached.step_s:.0f} s a step")
    if quick:
        return
    plan = Search(base, width=5, rounds=(n,)).plan([{"H800": 3008}], keep=1)
    best = plan.best[0]
    last = cached.step_s
    for name, after in plan.steps:
        words = f"{after.summary.step_s:.0f} s a step; {after.candidate.words}"
        yield beside(f"3,008 GPUs, {name}", "x", last / after.summary.step_s, None, words)
        last = after.summary.step_s
    gain = start.step_s / best.summary.step_s
    yield beside("3,008 GPUs, retuned, altogether", "x", gain, 1.66, best.candidate.words)
    roomy = changed(base, rollout__concurrency=16 * groups)
    full = [measure(changed(roomy, simulate__prefix_cache=caches)) for caches in (False, True)]
    words = ", ".join(f"{run.step_s:.0f} s" for run in full)
    yield beside("3,008 GPUs, prefix cache at 4,096 environments", "x", full[0].step_s / full[1].step_s, None, words)


PRODUCTION: dict[str, Experiment] = {"faults": faults, "retuning": retuning}
