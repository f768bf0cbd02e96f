"""The whole pipeline on real parts: mode `rollart` beside mode `sync`, with slow environments.

FrozenLake with an injected latency of N(0.2 s, 0.2 s) a turn, clipped at 0; the same model, task and batch in both
modes; the modes take turns, so that a noisy machine hits both. Reports iterations a minute, tokens a second, the
share of each part of a step, and peak memory.

    python benchmarks/end_to_end/skeleton.py            three rounds of five iterations
    python benchmarks/end_to_end/skeleton.py --quick    one round
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from rollart.observe.metrics import Row, read_metrics
from rollart.observe.runinfo import read_run

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "skeleton.json"
ITERATIONS = 5
# Run and not counted: the first iteration, which has no weights to switch and fills empty queues, and the last, which
# commits and evaluates its own weights as no other does.
WARM_UP = 1
CLOSING = 1
SETTINGS = [
    "task.latency_mean_s=0.2",
    "task.latency_std_s=0.2",
    "eval.every=1000",
    "eval.episodes=8",
    "checkpoint.every=1000",
    "buffer.drop_uniform=false",
    f"run.iterations={WARM_UP + ITERATIONS + CLOSING}",
]
MODES = {"rollart": ["run.mode=rollart", "buffer.alpha=1"], "sync": ["run.mode=sync", "buffer.alpha=0"]}


class Measured(msgspec.Struct):
    """One run of one mode."""

    seconds: float
    tokens_per_s: float
    parts: dict[str, float]
    peak_bytes: int


def measure(mode: str, round_number: int, folder: Path) -> Measured:
    name = f"{mode}-{round_number}"
    words = [f"run.folder={folder}", f"run.name={name}", f"run.seed={round_number}", *SETTINGS, *MODES[mode]]
    command = [sys.executable, "-m", "rollart.cli.main", "train", str(ROOT / "examples" / "frozenlake.yaml"), *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=900)
    rows = read_metrics(folder / name)[WARM_UP:-CLOSING]
    info = read_run(folder / name)
    assert info is not None
    seconds = [sum(parts(row).values()) for row in rows]
    return Measured(
        seconds=statistics.mean(seconds),
        tokens_per_s=statistics.mean(float(row["tokens_per_s"] or 0) for row in rows),
        parts={part: statistics.mean(parts(row).get(part, 0.0) for row in rows) for part in parts(rows[0])},
        peak_bytes=info.peak_memory_bytes or 0,
    )


def parts(row: Row) -> dict[str, float]:
    return {key.removeprefix("time/"): float(value or 0) for key, value in row.items() if key.startswith("time/")}


def report(runs: dict[str, list[Measured]]) -> list[dict[str, Any]]:
    ours, peer = runs["rollart"], runs["sync"]

    def row(metric: str, unit: str, pick: Any, *, higher_is_better: bool) -> dict[str, Any]:
        pairs = [(pick(a), pick(b)) for a, b in zip(ours, peer, strict=True)]
        ratios = [a / b if higher_is_better else b / a for a, b in pairs]
        return {
            "metric": metric,
            "unit": unit,
            "ours": statistics.median(a for a, _ in pairs),
            "peer": "sync",
            "peer_value": statistics.median(b for _, b in pairs),
            "published": None,
            "ratio": statistics.median(ratios),
            "spread": [min(ratios), max(ratios)],
        }

    rows = [
        row("iterations per minute", "1/min", lambda m: 60 / m.seconds, higher_is_better=True),
        row("generated tokens per second", "1/s", lambda m: m.tokens_per_s, higher_is_better=True),
        row("peak memory of all processes", "GiB", lambda m: m.peak_bytes / 2**30, higher_is_better=False),
    ]
    for mode, measured in runs.items():
        total = statistics.mean(m.seconds for m in measured)
        for part in measured[0].parts:
            share = statistics.mean(m.parts[part] for m in measured) / total
            rows.append({"metric": f"share of step time, {mode}: {part}", "unit": "%", "ours": 100 * share})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round instead of three")
    quick = parser.parse_args().quick
    runs: dict[str, list[Measured]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1 if quick else 3):
            for mode in MODES:
                measured = measure(mode, number, Path(folder))
                runs[mode].append(measured)
                print(f"round {number} {mode}: {measured.seconds:.2f} s an iteration", flush=True)
    result = {
        "name": "skeleton",
        "command": "python benchmarks/end_to_end/skeleton.py" + (" --quick" if quick else ""),
        "cpu": f"{platform.processor() or platform.machine()}, 2 cores",
        "rows": report(runs),
    }
    RESULT.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
