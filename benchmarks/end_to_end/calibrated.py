"""How far a world that is fitted to one real run is off for settings that the fit has not seen.

Trains the FrozenLake example on this machine: once to fit to, then with other batches, environments and modes, each
time beside the simulation of the same settings. Seconds are means over the counted iterations, CPU seconds those of
driver, engines and trainer. The learning rate is next to nothing: how fast a policy learns decides how long episodes
are and how many groups are dropped, differs from run to run, and is nothing that a simulator could know.

    python benchmarks/end_to_end/calibrated.py                 three rounds (or --rounds N): trains, then compares
    python benchmarks/end_to_end/calibrated.py --runs FOLDER   compares runs that such a call left in a folder
    python benchmarks/end_to_end/calibrated.py --quick         one round of one other setting
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from _runs import CLOSING, ROOT, measure, number, parts, write

from rollart.config import load
from rollart.observe.metrics import read_metrics
from rollart.runtime.folder import RunFolder
from rollart.simulate.calibrate import calibrate
from rollart.simulate.config import make_simulation
from rollart.simulate.run import simulate

CONFIG = ROOT / "examples" / "frozenlake.yaml"
COMMON = ["run.iterations=12", "train.lr=1e-9", "eval.every=1000", "eval.episodes=8", "checkpoint.every=1000"]
FIT = "fit"
OTHERS = {
    "small": ["buffer.batch_groups=10", "rollout.concurrency=96"],
    "sync": ["run.mode=sync_plus", "buffer.alpha=0"],
    "wide": ["buffer.batch_groups=40", "rollout.concurrency=400"],
}
ROLES = ("driver", "engines", "trainer")
GOAL = 25.0
SKIPPED = 2


class Step(NamedTuple):
    """The mean iteration of a run, without its first ones and its last."""

    wall_s: float
    cpu_s: float

    @classmethod
    def of(cls, folder: Path) -> Step:
        counted = read_metrics(folder)[SKIPPED:-CLOSING]
        return cls(
            fmean(sum(parts(row).values()) for row in counted),
            fmean(sum(number(row, f"{role}/cpu_s") for role in ROLES) for row in counted),
        )


def predicted(fitted: dict[str, Any], words: list[str], place: Path) -> Step:
    tree = {name: dict(value) if isinstance(value, dict) else value for name, value in fitted.items()}
    for word in [*words, f"run.folder={place.parent}", f"run.name={place.name}"]:
        load._apply(tree, word)
    simulation = make_simulation(tree)
    folder = RunFolder.of(simulation.config)
    folder.create(simulation.config, overwrite=True)
    simulate(simulation, folder)
    folder.close()
    return Step.of(folder.path)


def compared(runs: Path, names: list[str], rounds: int) -> list[dict[str, Any]]:
    """Each round's fit foretells that round's other settings."""
    pairs: dict[str, list[tuple[Step, Step]]] = {name: [] for name in (FIT, *names)}
    with tempfile.TemporaryDirectory() as place:
        for repeat in range(rounds):
            fitted = calibrate(runs / f"{FIT}-{repeat}")
            for name, found in pairs.items():
                of_round = f"{name}-{repeat}"
                ours = predicted(fitted, OTHERS.get(name, []), Path(place) / of_round)
                found.append((ours, Step.of(runs / of_round)))
    return [row for name, found in pairs.items() for row in rows_of(name, found)]


def rows_of(name: str, pairs: list[tuple[Step, Step]]) -> list[dict[str, Any]]:
    what = "fitted" if name == FIT else f"held out: {' '.join(OTHERS[name])}"
    return [
        beside(f"{metric}, {what}", [(ours[column], real[column]) for ours, real in pairs], held_out=name != FIT)
        for column, metric in enumerate(("step time", "CPU of a step"))
    ]


def beside(metric: str, pairs: list[tuple[float, float]], *, held_out: bool) -> dict[str, Any]:
    errors = sorted(100 * (simulated / measured - 1) for simulated, measured in pairs)
    told = ", ".join(f"{error:+.0f}" for error in errors)
    print(f"{metric:80} off by {told} %", flush=True)
    return {
        "metric": metric,
        "unit": "s",
        "ours": median(simulated for simulated, _ in pairs),
        "peer": "real run",
        "peer_value": median(measured for _, measured in pairs),
        "published": None,
        "ratio": GOAL / max(abs(median(errors)), 0.1) if held_out else None,
        "spread": f"off by {told} %",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one other setting")
    parser.add_argument("--runs", type=Path, help="a folder of runs to compare, or to leave them in")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds = 1
    names = list(OTHERS)[:1] if arguments.quick else list(OTHERS)
    with tempfile.TemporaryDirectory() as temporary:
        runs = arguments.runs or Path(temporary)
        for repeat in range(arguments.rounds):
            for name in (FIT, *names):
                if not read_metrics(runs / f"{name}-{repeat}"):
                    words = [*COMMON, *OTHERS.get(name, []), f"run.seed={repeat}"]
                    measure(CONFIG, runs, f"{name}-{repeat}", words)
        rows = compared(runs, names, arguments.rounds)
    options = " --quick" if arguments.quick else f" --rounds {arguments.rounds}"
    write("calibrated", "python benchmarks/end_to_end/calibrated.py" + options, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
