"""Where our values stand apart from the papers': each reason that docs/simulator.md gives, tried alone.

A row says which premise it changes; everything else is as in the experiment whose value it explains.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from _experiments import ENVIRONMENTS, Experiment, mode_setup
from _paper import AGENTIC, TO_H20, Measured, Row, beside, changed, fleet, gain_of, h800, measure, parts_of, setup

from rollart.simulate.catalog import builtin

ITERATIONS = 5
MIXED_OVER = {"H800 only": (1.12, 1.37), "H20 only": (1.30, 1.68)}
AREAL_OVER_ONE_OFF, ROLLART_OVER_AREAL = (1.03, 1.06), (1.22, 1.36)


def tail(quick: bool) -> Iterator[Row]:
    """AReaL beside One-off and RollArt: with all trajectories of a task equally long, so that nobody waits for a rare
    one; and with AReaL's own rule, which admits no trajectory beyond (version + 1 + eta) batches (arXiv 2505.24298).
    In RollArt's order the served version is one behind when a batch is waited for, so with eta 1 one batch is alive
    then: our alpha 0.
    """
    if quick:
        return
    equal = {task: _equally_long(profile) for task, (profile, _, _) in AGENTIC.items()}
    for name, tasks in (("", {}), ("equal lengths in each task, ", {"simulate__tasks": equal})):
        runs = {mode: measure(changed(_mode(mode), **tasks)) for mode in ("sync_plus", "one_off", "areal", "rollart")}
        runs["areal by its own rule"] = measure(changed(_mode("areal"), buffer__alpha=0.0, **tasks))
        if tasks:
            words = f"train {runs['sync_plus'].summary.parts['train'] / runs['sync_plus'].step_s:.0%} of a step"
            yield _gain(f"8B {name}one_off over sync_plus", runs["one_off"], runs["sync_plus"], (1.31, 1.47), words)
        for areal in ("areal", "areal by its own rule") if tasks else ("areal by its own rule",):
            yield _gain(f"8B {name}{areal} over one_off", runs[areal], runs["one_off"], AREAL_OVER_ONE_OFF)
            yield _gain(f"8B {name}rollart over {areal}", runs["rollart"], runs[areal], ROLLART_OVER_AREAL)


def _mode(mode: str) -> dict[str, Any]:
    return mode_setup("8B", mode, 6)


def _gain(metric: str, better: Measured, worse: Measured, published: Any, note: str = "") -> Row:
    steps = f"{worse.step_s:.0f} s, {better.step_s:.0f} s"
    return beside(metric, "x", gain_of(better, worse), published, f"{note}; {steps}" if note else steps)


def _equally_long(name: str) -> dict[str, Any]:
    profile: dict[str, Any] = msgspec.to_builtins(builtin().profile(name))
    turns, response = profile["turns"], profile["response"]
    mean = turns["mean"] if turns.get("mean") else (turns["low"] + turns["high"]) / 2
    return profile | {
        "turns": {"mean": round(mean)},
        "response": response | {"std": 0.05 * response["mean"]},
        "instance": 0.0,
    }


def from_areal(quick: bool) -> Iterator[Row]:
    """What separates RollArt from AReaL, one after the other; then a broadcast that gathers and converts weights as
    slowly as the push into the store does.
    """
    if quick:
        return
    alike = changed(
        _mode("rollart"), simulate__generation=[fleet("H800", 96)], generation__affinity={"default": "H800"}
    )
    slow = {"simulate__calibration": {"broadcast_gibs": builtin().calibration.push_gibs}}
    broadcast = {"simulate__transport": "broadcast"}
    areal, evicts, stores, ours = map(measure, (_mode("areal"), changed(alike, **broadcast), alike, _mode("rollart")))
    yield _gain("8B eviction alone", evicts, areal, None)
    yield _gain("8B the store alone", stores, evicts, (1.10, 1.16))
    yield _gain("8B a third of the devices H20, with the map, alone", ours, stores, None)
    late = measure(changed(alike, **broadcast, **slow))
    yield _gain("8B slow broadcast, the store alone", stores, late, (1.10, 1.16))
    yield _gain(
        "8B slow broadcast, rollart over areal", ours, measure(changed(_mode("areal"), **slow)), ROLLART_OVER_AREAL
    )


def prefill_again(quick: bool) -> Iterator[Row]:
    """Without a prefix cache, each turn computes its whole context: affinity at equal cost, with as many environments
    as everywhere and with a batch's worth; and RollArt over AReaL, which differ by affinity and transfer.
    """
    if quick:
        return
    for environments, cached in ((512, True), (ENVIRONMENTS, False), (512, False)):
        runs = {name: measure(tree) for name, tree in _equal_cost(environments, cached).items()}
        name = f"8B {environments} environments, {'prefix cache' if cached else 'no prefix cache'}"
        for other, published in MIXED_OVER.items():
            yield _gain(f"{name}, mixed over {other}", runs["mixed"], runs[other], published, _used(runs["mixed"]))
    ours, areal = (measure(changed(_mode(mode), simulate__prefix_cache=False)) for mode in ("rollart", "areal"))
    yield _gain("8B no prefix cache, rollart over areal", ours, areal, ROLLART_OVER_AREAL)


def _equal_cost(environments: int, cached: bool) -> dict[str, dict[str, Any]]:
    cases: dict[str, tuple[list[dict[str, Any]], dict[str, str] | None]] = {
        "H800 only": ([fleet("H800", 72)], None),
        "H20 only": ([fleet("H20", 208)], None),
        "mixed": ([fleet("H800", 64), fleet("H20", 24)], TO_H20),
    }
    return {
        name: changed(_fleets(fleets, moved, environments), simulate__prefix_cache=cached)
        for name, (fleets, moved) in cases.items()
    }


def _fleets(fleets: list[dict[str, Any]], moved: dict[str, str] | None, environments: int) -> dict[str, Any]:
    tree = setup(
        "8B", "rollart", fleets, h800(32), AGENTIC, groups=64, iterations=ITERATIONS, alpha=1.0,
        transport="store", affinity=moved,
    )  # fmt: skip
    return changed(tree, rollout__concurrency=environments)


def _used(run: Measured) -> str:
    return ", ".join(f"{hardware} {part:.0%}" for hardware, part in run.run.generation_used.items())


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
    runs = {name: measure(_fleets(fleets, moved, 1024)) for name, (fleets, moved) in cases.items()}
    for name, run in list(runs.items())[1:]:
        gain = gain_of(run, runs["H800 only"])
        words = f"{run.step_s:.0f} s a step, {_used(run)}"
        yield beside(f"8B full engines, {name} over H800 only", "x", gain, None, words)


def three_jobs(quick: bool) -> Iterator[Row]:
    """Rewards on functions: three jobs' batches at once instead of one; batches that nobody waits for the end of
    (rollart instead of sync_plus); and both.
    """
    if quick:
        return
    for words, mode, groups in (
        ("three batches at once", "sync_plus", 63),
        ("asynchronous", "rollart", 21),
        ("asynchronous, three batches at once", "rollart", 63),
    ):
        base = setup(
            "8B", mode, [fleet("H800", 4)], h800(8), {"GEM-math": ("gem-math", 8192, 5)}, groups=groups, size=4,
            iterations=5, context=16384, alpha=1.0 if mode == "rollart" else 0.0,
        )  # fmt: skip
        local = measure(changed(base, simulate__rewards={"kind": "dedicated", "hardware": "H800", "gpus": 4}))
        functions = {"kind": "serverless", "call_s": 0.01, "cold_s": 0.25}
        remote = measure(changed(base, simulate__generation=[fleet("H800", 8)], simulate__rewards=functions))
        waits = mode == "sync_plus"  # where nobody waits for a batch, the rollout's pace is that of the tokens
        gain = local.rollout_s / remote.rollout_s if waits else gain_of(remote, local)
        note = f"judge {local.run.rewards_used or 0:.0%} busy, {local.run.preemptions} preemptions"
        what = "rollout" if waits else "tokens a second"
        yield beside(f"{words}: {what}, 4 + 4 GPUs over 8 and functions", "x", gain, 158 / 77, note)


def pushes(quick: bool) -> Iterator[Row]:
    """32B when each of the trainer's four nodes pushes its part of the weights."""
    if quick:
        return
    training = {"hardware": "H800", "gpus": 32, "push_streams": 4}
    pushed = measure(changed(mode_setup("32B", "rollart", 6), simulate__training=training))
    for name in ("rollart", "areal"):
        other = measure(mode_setup("32B", name, 6))
        yield beside(f"32B rollart with 4 pushes over {name}", "x", gain_of(pushed, other), None, parts_of(pushed))


REASONS: dict[str, Experiment] = {
    "tail": tail,
    "from_areal": from_areal,
    "prefill_again": prefill_again,
    "full_engines": full_engines,
    "pushes": pushes,
    "three_jobs": three_jobs,
}
