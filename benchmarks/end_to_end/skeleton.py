"""The whole pipeline on real parts: mode `rollart` beside mode `sync`, with slow environments.

FrozenLake with an injected latency of N(0.2 s, 0.2 s) a turn, clipped at 0; the same model, task and batch in both
modes; the modes take turns, so that a noisy machine hits both. Reports iterations a minute, tokens a second, the
share of each part of a step, and peak memory. `modes.py` compares all modes.

    python benchmarks/end_to_end/skeleton.py            three rounds of five iterations
    python benchmarks/end_to_end/skeleton.py --quick    one round
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from _runs import CLOSING, ROOT, WARM_UP, Measured, compared, measure, write

CONFIG = ROOT / "examples" / "frozenlake.yaml"
ITERATIONS = 5
SETTINGS = [
    "tasks.FrozenLake.latency_mean_s=0.2",
    "tasks.FrozenLake.latency_std_s=0.2",
    "eval.every=1000",
    "eval.episodes=8",
    "checkpoint.every=1000",
    "buffer.drop_uniform=false",
    f"run.iterations={WARM_UP + ITERATIONS + CLOSING}",
]
MODES = {"rollart": ["run.mode=rollart", "buffer.alpha=1"], "sync": ["run.mode=sync", "buffer.alpha=0"]}


def report(runs: dict[str, list[Measured]]) -> list[dict[str, Any]]:
    row = partial(compared, runs["rollart"], runs["sync"], "sync")
    rows = [
        row("iterations per minute", "1/min", lambda m: 60 / m.seconds, higher_is_better=True),
        row("generated tokens per second", "1/s", lambda m: m.tokens_per_s, higher_is_better=True),
        row("peak memory of all processes", "GiB", lambda m: m.peak_bytes / 2**30, higher_is_better=False),
    ]
    for mode, measured in runs.items():
        total = statistics.mean(m.seconds for m in measured)
        for part in measured[0].parts:
            share = statistics.mean(m.parts.get(part, 0.0) for m in measured) / total
            rows.append({"metric": f"share of step time, {mode}: {part}", "unit": "%", "ours": 100 * share})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round instead of three")
    quick = parser.parse_args().quick
    runs: dict[str, list[Measured]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1 if quick else 3):
            for mode, words in MODES.items():
                words = [*words, f"run.seed={number}", *SETTINGS]
                measured = measure(CONFIG, Path(folder), f"{mode}-{number}", words)
                runs[mode].append(measured)
                print(f"round {number} {mode}: {measured.seconds:.2f} s an iteration", flush=True)
    write("skeleton", "python benchmarks/end_to_end/skeleton.py" + (" --quick" if quick else ""), report(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
