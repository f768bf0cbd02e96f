"""What a simulated turn costs, by component, and how many turns a second one core makes of the whole control plane.

The time is the control plane's own: routing, scheduling, the buffer and the trace are the product's, so what is saved
here is saved there. Shares come from a profile of a shorter run and are applied to the unprofiled time.

    python benchmarks/end_to_end/simulator_speed.py            128 GPUs; the main experiment; 3,000 GPUs
    python benchmarks/end_to_end/simulator_speed.py --quick    32 GPUs
"""

from __future__ import annotations

import argparse
import cProfile
import os
import platform
import pstats
import resource
import sys
from pathlib import Path
from typing import Any

import msgspec
from _experiments import MODES, mode_setup
from _paper import Row, changed, measure
from _production import production

RESULTS = Path(__file__).resolve().parents[1] / "results" / "simulator_speed.json"
GOAL = 4000.0
COMPONENTS = {
    "llmproxy/sim": "simulated engines",
    "rollart/simulate": "simulated environments, trainer, links",
    "llmproxy": "llmproxy",
    "envmanager": "envmanager",
    "samplebuffer": "samplebuffer",
    "rollart": "rollart (policy, controller, trace, metrics)",
    "asyncio": "event loop",
    "async_solipsism": "event loop",
}


def profiled(tree: dict[str, Any]) -> dict[str, float]:
    """Seconds by component."""
    profile = cProfile.Profile()
    profile.enable()
    measure(tree)
    profile.disable()
    seconds: dict[str, float] = {}
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    for (file, _, name), (_, _, own, _, callers) in stats.items():
        if file != "~":
            _add(seconds, _component(file), own)
            continue
        for (caller, _, _), (_, _, part, _) in callers.items():  # built-in functions belong to whoever calls them
            _add(seconds, "event loop" if "select" in name else _component(caller), part)
    return seconds


def _add(seconds: dict[str, float], component: str, more: float) -> None:
    seconds[component] = seconds.get(component, 0.0) + more


def _component(file: str) -> str:
    return next((name for path, name in COMPONENTS.items() if f"/{path}/" in file), "other libraries")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="32 GPUs")
    arguments = parser.parse_args()
    tree = mode_setup("8B", "rollart", 4)
    if arguments.quick:
        fleets = [{"hardware": "H800", "gpus": 16}, {"hardware": "H20", "gpus": 8}]
        tree = changed(
            tree,
            buffer__batch_groups=16,
            rollout__concurrency=128,
            simulate__generation=fleets,
            simulate__training={"hardware": "H800", "gpus": 8},
        )
    plain = measure(tree)
    rate = plain.run.turns / plain.cpu_s
    rows = [
        Row(
            metric="turns a second of one core",
            unit="1/s",
            ours=rate,
            peer="goal",
            peer_value=GOAL,
            ratio=rate / GOAL,
        )
    ]
    seconds = profiled(changed(tree, run__iterations=3))
    total = sum(seconds.values())
    for name, own in sorted(seconds.items(), key=lambda item: -item[1]):
        share = own / total
        rows.append(Row(metric=f"of a turn: {name}", unit="us", ours=share * 1e6 / rate, spread=f"{share:.0%}"))
    if not arguments.quick:
        five = sum(measure(mode_setup("8B", mode, 5)).cpu_s for mode in MODES)
        rows.append(_within("the main experiment: 128 GPUs, five modes, five iterations", "CPU s", five, 300.0))
        large = measure(production(20))
        words = f"{large.run.turns} turns, {large.run.turns / large.cpu_s:.0f} a second"
        rows.append(_within("3,000 GPUs, 20 iterations", "CPU s", large.cpu_s, 600.0, words))
        rows.append(_within("3,000 GPUs, most memory of all of this", "GiB", _memory(), 4.0))
    for row in rows:
        print(f"{row.metric:55} {row.ours:10.4g} {row.unit}  {row.spread or ''}")
    command = "python benchmarks/end_to_end/simulator_speed.py" + (" --quick" if arguments.quick else "")
    cpu = f"{platform.machine()}, {os.cpu_count()} cores"
    result = {"name": "simulator_speed", "command": command, "cpu": cpu, "rows": rows}
    RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    return 0


def _within(metric: str, unit: str, ours: float, goal: float, words: str | None = None) -> Row:
    return Row(metric=metric, unit=unit, ours=ours, peer="goal", peer_value=goal, ratio=goal / ours, spread=words)


def _memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)


if __name__ == "__main__":
    sys.exit(main())
