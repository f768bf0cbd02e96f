"""Whole runs of `rollart train` as measurements, and the rows that compare them."""

from __future__ import annotations

import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollart.observe.metrics import Row, read_metrics
from rollart.observe.runinfo import read_run

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
# Run and not counted: the first iteration, which has no weights to switch and fills empty queues, and the last, which
# commits and evaluates its own weights as no other does.
WARM_UP = 1
CLOSING = 1


class Measured(msgspec.Struct):
    """One run: its counted iterations' means, and what all processes took at most."""

    seconds: float
    trained_per_s: float
    tokens_per_s: float
    stale: float
    """Trajectories that were thrown away for their age, as a share of those that ended."""
    over: float
    """Trained trajectories beyond the staleness bound, as a share."""
    driver_share: float
    """CPU seconds of the driver's own process, as a share of the wall time."""
    parts: dict[str, float]
    peak_bytes: int


def measure(config: Path, folder: Path, name: str, words: Sequence[str]) -> Measured:
    """Train with `words` as overrides, in a process of its own."""
    command = [sys.executable, "-m", "rollart.cli.main", "train", str(config)]
    command += [f"run.folder={folder}", f"run.name={name}", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=900)
    return measured(folder / name)


def measured(run: Path) -> Measured:
    """What a run that has ended took."""
    rows = read_metrics(run)
    counted = rows[WARM_UP:-CLOSING]
    info = read_run(run)
    assert info is not None
    wall = sum(sum(parts(row).values()) for row in counted)
    return Measured(
        seconds=wall / len(counted),
        trained_per_s=sum(number(row, "trained_tokens") for row in counted) / wall,
        tokens_per_s=statistics.mean(number(row, "tokens_per_s") for row in counted),
        stale=_share(rows[WARM_UP - 1], rows[-CLOSING - 1], "ledger/stale"),
        over=statistics.mean(number(row, "staleness/over") for row in counted),
        driver_share=sum(number(row, "driver/cpu_s") for row in counted) / wall,
        parts={part: statistics.mean(parts(row).get(part, 0.0) for row in counted) for part in parts(counted[-1])},
        peak_bytes=info.peak_memory_bytes or 0,
    )


def number(row: Row, key: str) -> float:
    return float(row.get(key) or 0)


def parts(row: Row) -> dict[str, float]:
    return {key.removeprefix("time/"): float(value or 0) for key, value in row.items() if key.startswith("time/")}


def _share(before: Row, after: Row, column: str) -> float:
    ended = [key for key in after if key.startswith("ledger/") and key.rsplit("/")[-1] not in ("running", "buffered")]
    total = sum(number(after, key) - number(before, key) for key in ended if key != "ledger/issued")
    return (number(after, column) - number(before, column)) / total if total else 0.0


def compared(
    ours: Sequence[Measured], theirs: Sequence[Measured], peer: str, metric: str, unit: str,
    pick: Callable[[Measured], float], *, higher_is_better: bool,
) -> dict[str, Any]:  # fmt: skip
    """One row: medians, and the ratio of each interleaved pair."""
    pairs = [(pick(a), pick(b)) for a, b in zip(ours, theirs, strict=True)]
    ratios = [(a / b if higher_is_better else b / a) for a, b in pairs if a and b]
    return {
        "metric": metric,
        "unit": unit,
        "ours": statistics.median(a for a, _ in pairs),
        "peer": peer,
        "peer_value": statistics.median(b for _, b in pairs),
        "published": None,
        "ratio": statistics.median(ratios) if ratios else None,
        "spread": [min(ratios), max(ratios)] if ratios else None,
    }


def write(name: str, command: str, rows: list[dict[str, Any]]) -> None:
    result = {"name": name, "command": command, "cpu": f"{platform.processor() or platform.machine()}, 2 cores"}
    path = RESULTS / f"{name}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result | {"rows": rows})) + b"\n")
