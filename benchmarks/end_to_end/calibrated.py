"""How far a world that is fitted to one real run is off for settings that the fit has not seen.

Trains the FrozenLake example on this machine: once to fit to, then with other batches, environments and modes, each
time beside the simulation of the same settings. Step times are means over the counted iterations.

    python benchmarks/end_to_end/calibrated.py                 trains, then compares
    python benchmarks/end_to_end/calibrated.py --runs FOLDER   compares runs that such a call left in a folder
    python benchmarks/end_to_end/calibrated.py --quick         one other setting
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from _runs import CLOSING, ROOT, measure, number, parts, write

from rollart.config import load
from rollart.observe.metrics import read_metrics
from rollart.runtime.folder import RunFolder
from rollart.simulate.calibrate import calibrate
from rollart.simulate.config import make_simulation
from rollart.simulate.run import simulate

CONFIG = ROOT / "examples" / "frozenlake.yaml"
COMMON = ["run.iterations=12", "eval.every=1000", "eval.episodes=8", "checkpoint.every=1000"]
FIT = "fit"
OTHERS = {
    "small": ["buffer.batch_groups=10", "rollout.concurrency=96"],
    "sync": ["run.mode=sync_plus", "buffer.alpha=0"],
    "wide": ["buffer.batch_groups=40", "rollout.concurrency=400"],
}
GOAL = 25.0
SKIPPED = 2


def step_seconds(folder: Path) -> float:
    """The mean step of a run, without its first iterations and its last."""
    counted = read_metrics(folder)[SKIPPED:-CLOSING]
    return sum(sum(parts(row).values()) for row in counted) / len(counted)


def predicted(fitted: dict[str, Any], words: list[str], place: Path) -> float:
    tree = {name: dict(value) if isinstance(value, dict) else value for name, value in fitted.items()}
    for word in [*words, f"run.folder={place.parent}", f"run.name={place.name}"]:
        load._apply(tree, word)
    simulation = make_simulation(tree)
    folder = RunFolder.of(simulation.config)
    folder.create(simulation.config, overwrite=True)
    simulate(simulation, folder)
    folder.close()
    return step_seconds(folder.path)


def compared(runs: Path, names: list[str]) -> list[dict[str, Any]]:
    fitted = calibrate(runs / FIT)
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for name in (FIT, *names):
            real = step_seconds(runs / name)
            ours = predicted(fitted, OTHERS.get(name, []), Path(place) / name)
            error = 100 * (ours / real - 1)
            what = "fitted" if name == FIT else f"held out: {' '.join(OTHERS[name])}"
            print(f"{what:60} simulated {ours:.2f} s, measured {real:.2f} s: {error:+.0f} %", flush=True)
            rows.append(
                {
                    "metric": f"step time, {what}",
                    "unit": "s",
                    "ours": ours,
                    "peer": "real run",
                    "peer_value": real,
                    "published": None,
                    "ratio": None if name == FIT else GOAL / max(abs(error), 0.1),
                    "spread": f"{error:+.0f} %",
                }
            )
    return rows


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
