"""How far a world that is fitted to one real run is off for settings that the fit has not seen.

Trains the FrozenLake example on this machine: once to fit to, then with other batches, environments and modes, each
time beside the simulation of the same settings. Seconds are means over the counted iterations, CPU seconds those of
driver, engines and trainer. The learning rate is next to nothing: how fast a policy learns decides how long episodes
are and how many groups are dropped, differs from run to run, and is nothing that a simulator could know.

    python benchmarks/end_to_end/calibrated.py                 trains, then compares
    python benchmarks/end_to_end/calibrated.py --runs FOLDER   compares runs that such a call left in a folder
    python benchmarks/end_to_end/calibrated.py --quick         one other setting
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import fmean
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


def compared(runs: Path, names: list[str]) -> list[dict[str, Any]]:
    fitted = calibrate(runs / FIT)
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for name in (FIT, *names):
            real = Step.of(runs / name)
            ours = predicted(fitted, OTHERS.get(name, []), Path(place) / name)
            what = "fitted" if name == FIT else f"held out: {' '.join(OTHERS[name])}"
            for metric, simulated, measured in zip(("step time", "CPU of a step"), ours, real, strict=True):
                rows.append(beside(f"{metric}, {what}", simulated, measured, held_out=name != FIT))
    return rows


def beside(metric: str, simulated: float, measured: float, *, held_out: bool) -> dict[str, Any]:
    error = 100 * (simulated / measured - 1)
    print(f"{metric:80} simulated {simulated:.2f} s, measured {measured:.2f} s: {error:+.0f} %", flush=True)
    return {
        "metric": metric,
        "unit": "s",
        "ours": simulated,
        "peer": "real run",
        "peer_value": measured,
        "published": None,
        "ratio": GOAL / max(abs(error), 0.1) if held_out else None,
        "spread": f"{error:+.0f} %",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one other setting")
    parser.add_argument("--runs", type=Path, help="a folder of runs to compare, or to leave them in")
    arguments = parser.parse_args()
    names = list(OTHERS)[:1] if arguments.quick else list(OTHERS)
    with tempfile.TemporaryDirectory() as temporary:
        runs = arguments.runs or Path(temporary)
        for name in (FIT, *names):
            if not read_metrics(runs / name):
                measure(CONFIG, runs, name, [*COMMON, *OTHERS.get(name, [])])
        rows = compared(runs, [name for name in names if number(read_metrics(runs / name)[-1], "step")])
    write("calibrated", "python benchmarks/end_to_end/calibrated.py" + (" --quick" if arguments.quick else ""), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
