"""The RollArt paper's production run: faults at that size, and what its retuning gained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from _experiments import QUICK, Experiment
from _paper import AGENTIC, SWE, Row, beside, changed, fleet, h800, measure, parts_of, setup

from rollart.planner.search import Search


def production(iterations: int, groups: int = 256, gpus: int = 3008, **changes: Any) -> dict[str, Any]:
    """The paper's production run: over 3,000 GPUs, one in six of which trains, alpha 1, a large mixture of experts,
    prompts to 12k and responses to 46k; tasks of 1 to 48 turns. Each of the trainer's nodes pushes its part of the
    weights; there is an environment for every fourth trajectory of a batch, as in the main experiment.
    """
    trains = round(gpus / 6 / 8) * 8
    profiles = {**SWE, **AGENTIC, "Think": ("rlvr-think", 30720, 1)}
    tree = setup(
        "qwen3-235b-a22b",
        "rollart",
        [fleet("H800", gpus - trains, 8)],
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
    """The production run without a prefix cache, with it, and with what the planner makes of its devices. Then the
    same with an eighth of the devices, which is to say eight times the work for each: there engines are full.
    """
    if quick:
        yield from _retuned("48 GPUs", production(QUICK, 32, 48), 48, quick)
        return
    for gpus in (3008, 376):
        yield from _retuned(f"{gpus:,} GPUs", production(8, 256, gpus), gpus, quick)


def _retuned(where: str, base: dict[str, Any], gpus: int, quick: bool) -> Iterator[Row]:
    start = measure(changed(base, simulate__prefix_cache=False))
    waits = start.summary.parts["get_batch"] / start.step_s
    yield beside(f"{where}, 1 : 5, no prefix cache: step time", "s", start.step_s, None, parts_of(start))
    yield beside(f"{where}, the same: get_batch waits, part of a step", "%", 100 * waits, (0.0, 62.0))
    cached = measure(base)
    yield beside(f"{where}, prefix cache", "x", start.step_s / cached.step_s, None, parts_of(cached))
    if quick:
        return
    plan = Search(base, width=4, rounds=(5, 8)).plan([{"H800": gpus}], keep=1)
    assert plan.start is not None
    last = plan.start.summary.step_s  # of a part of the fleet, where it is large
    for name, after in plan.steps:
        yield beside(f"{where}, then {name}", "x", last / after.summary.step_s, None, after.candidate.words)
        last = after.summary.step_s
    gained = start.step_s / cached.step_s * plan.start.summary.step_s / last
    words = f"{start.step_s / gained:.0f} s a step; {plan.best[0].candidate.words}; noise {plan.margin:.1%}"
    yield beside(f"{where}, retuned and cached, altogether", "x", gained, 1.66, words)


PRODUCTION: dict[str, Experiment] = {"faults": faults, "retuning": retuning}
