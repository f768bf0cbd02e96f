"""The experiments of the RollArt and ROLL Flash papers, on the product's control plane and simulated devices.

Prints each of our values beside the published one with the deviation, and draws them. Constants are fitted once, as
packages/rollart/src/rollart/simulate/data/calibration.yaml says, and are the same everywhere.

    python benchmarks/end_to_end/paper.py                   everything
    python benchmarks/end_to_end/paper.py --quick           a small part of each experiment, under three minutes
    python benchmarks/end_to_end/paper.py --only main_8B,weights    some of them; the others' rows are kept
    python benchmarks/end_to_end/paper.py --plots FOLDER    where to draw (default: not at all)
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from pathlib import Path

import msgspec
from _experiments import EXPERIMENTS as ROLLART
from _flash import FLASH
from _paper import Row
from _plots import draw
from _production import PRODUCTION
from _reasons import REASONS

EXPERIMENTS = ROLLART | PRODUCTION | REASONS | FLASH
RESULTS = Path(__file__).resolve().parents[1] / "results" / "paper.json"


class Result(msgspec.Struct, kw_only=True):
    """What is kept of all experiments: rows carry the experiment's name before a colon."""

    name: str = "paper"
    command: str = "python benchmarks/end_to_end/paper.py"
    cpu: str
    rows: list[Row]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small part of each experiment; printed, not kept")
    parser.add_argument("--only", help=f"some of {', '.join(EXPERIMENTS)}")
    parser.add_argument("--plots", type=Path, help="a folder for drawings")
    arguments = parser.parse_args()
    names = arguments.only.split(",") if arguments.only else list(EXPERIMENTS)
    if unknown := set(names) - set(EXPERIMENTS):
        parser.error(f"no such experiment: {', '.join(sorted(unknown))}")
    rows: list[Row] = []
    for name in names:
        start = time.process_time()
        for row in EXPERIMENTS[name](arguments.quick):
            row.metric = f"{name}: {row.metric}"
            rows.append(row)
            print(f"{row.metric:78} {row.ours:9.4g} {row.unit:6} published {row.published}  {row.spread}", flush=True)
        print(f"  {name}: {time.process_time() - start:.0f} CPU s", flush=True)
        if not arguments.quick:
            _write(rows + _kept(names))
    if arguments.plots is not None:
        draw(rows, arguments.plots)
    return 0


def _kept(names: list[str]) -> list[Row]:
    """The rows of earlier full runs of the other experiments."""
    if not RESULTS.is_file():
        return []
    before = msgspec.json.decode(RESULTS.read_bytes(), type=Result)
    return [row for row in before.rows if row.metric.partition(":")[0] not in names]


def _write(rows: list[Row]) -> None:
    order = list(EXPERIMENTS)
    rows = sorted(rows, key=lambda row: order.index(row.metric.partition(":")[0]))
    cpu = f"{platform.machine()}, {os.cpu_count()} cores"
    result = Result(cpu=cpu, rows=rows)
    RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")


if __name__ == "__main__":
    sys.exit(main())
