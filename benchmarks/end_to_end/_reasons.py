"""Where our values stand apart from the RollArt paper's: each reason that docs/simulator.md gives, tried alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from _experiments import Experiment, mode_setup
from _paper import AGENTIC, TO_H20, Row, beside, changed, fleet, gain_of, h800, measure, parts_of, setup

from rollart.simulate.catalog import builtin

ITERATIONS = 5


def tail(quick: bool) -> Iterator[Row]:
    """AReaL over One-off when all trajectories of a task are equally long: nobody waits for a rare one."""
    if quick:
        return
    equal = {task: _equally_long(profile) for task, (profile, _, _) in AGENTIC.items()}
    runs = [
        measure(changed(mode_setup("8B", mode, ITERATIONS), simulate__tasks=equal)) for mode in ("one_off", "areal")
    ]
    words = ", ".join(f"{run.step_s:.0f} s" for run in runs)
    yield beside("8B, equal lengths in each task: areal over one_off", "x", gain_of(runs[1], runs[0]), None, words)


def _equally_long(name: str) -> dict[str, Any]:
    profile: dict[str, Any] = msgspec.to_builtins(builtin().profile(name))
    turns, response = profile["turns"], profile["response"]
    mean = turns["mean"] if turns.get("mean") else (turns["low"] + turns["high"]) / 2
    return profile | {
        "turns": {"mean": round(mean)},
        "response": response | {"std": 0.05 * response["mean"]},
        "instance": 0.0,
    }


def full_engines(quick: bool) -> Iterator[Row]:
    """Affinity at equal cost where generation is what a step waits for: a quarter of the affinity experiment's
    generation devices, and 1,024 environments; with the paper's map, and with one task on H20 instead of two.
    """
    if quick:
        return
    mixed = [fleet("H800", 16), fleet("H20", 6)]
    cases: dict[str, tuple[list[dict[str, Any]], dict[str, str] | None]] = {
        "H800 only": ([fleet("H800", 18)], None),
        "H20 only": ([fleet("H20", 52)], None),
        "mixed, the paper's map": (mixed, TO_H20),
        "mixed, only GEM-game on H20": (mixed, {"default": "H800", "GEM-game": "H20"}),
        "mixed, no map": (mixed, None),
    }
    runs = {}
    for name, (fleets, moved) in cases.items():
        tree = setup(
            "8B", "rollart", fleets, h800(32), AGENTIC, groups=64, iterations=ITERATIONS, alpha=1.0,
            transport="store", affinity=moved,
        )  # fmt: skip
        runs[name] = measure(changed(tree, rollout__concurrency=1024))
    for name, run in list(runs.items())[1:]:
        used = ", ".join(f"{hardware} {part:.0%}" for hardware, part in run.run.generation_used.items())
        gain = gain_of(run, runs["H800 only"])
        yield beside(f"8B full engines, {name} over H800 only", "x", gain, None, f"{run.step_s:.0f} s a step, {used}")


def pushes(quick: bool) -> Iterator[Row]:
    """32B when each of the trainer's four nodes pushes its part of the weights."""
    if quick:
        return
    training = {"hardware": "H800", "gpus": 32, "push_streams": 4}
    pushed = measure(changed(mode_setup("32B", "rollart", 6), simulate__training=training))
    for name in ("rollart", "areal"):
        other = measure(mode_setup("32B", name, 6))
        yield beside(f"32B rollart with 4 pushes over {name}", "x", gain_of(pushed, other), None, parts_of(pushed))


REASONS: dict[str, Experiment] = {"tail": tail, "full_engines": full_engines, "pushes": pushes}
