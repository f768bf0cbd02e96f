"""The five modes on real parts: one controller, five policies, the same model, task, batch and seeds.

FrozenLake with few holes and many turns, so that episodes are long-tailed; an injected latency of N(0.3 s, 0.3 s) a
turn, clipped at 0, and of 0.2 s a reward. The modes take turns, so that a noisy machine hits all. Reports an
iteration's seconds, trained tokens a second, and the shares of trajectories that were thrown away for their age and
that were trained beyond the bound. Generation, environments and the trainer share two cores here, so what overlap can
win is less than on devices of their own. Episodes that take longer than the steps that they may live through are lost
to every bound: the larger a batch, and the slower its step, the fewer they are; `--small` has a third of it.

    python benchmarks/end_to_end/modes.py            three rounds of three counted iterations (or --rounds N)
    python benchmarks/end_to_end/modes.py --small    the same with a third of the batch
    python benchmarks/end_to_end/modes.py --quick    one round of two
    python benchmarks/end_to_end/modes.py --against areal    rollart and this mode only
    python benchmarks/end_to_end/modes.py --learn    whole trainings of rollart and areal: time to a success rate
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _runs import CLOSING, ROOT, WARM_UP, Measured, compared, measure, write

from rollart.observe.metrics import read_metrics

CONFIG = ROOT / "examples" / "frozenlake.yaml"
ASYNCHRONOUS = "buffer.alpha=1"
MODES = {
    "rollart": ASYNCHRONOUS,
    "sync": "buffer.alpha=0",
    "sync_plus": "buffer.alpha=0",
    "one_off": "buffer.alpha=0",
    "areal": ASYNCHRONOUS,
}
SLOW = [
    "tasks.FrozenLake.latency_mean_s=0.3",
    "tasks.FrozenLake.latency_std_s=0.3",
    "tasks.FrozenLake.reward_latency_s=0.2",
]
LONG = ["tasks.FrozenLake.max_turns=30", "tasks.FrozenLake.frozen=0.9", "buffer.drop_uniform=false"]
LARGE = ["buffer.batch_groups=48", "rollout.concurrency=768"]
SMALL = ["buffer.batch_groups=16", "rollout.concurrency=256"]
ITERATIONS = 3
BARE = ["eval.every=1000", "eval.episodes=8", "checkpoint.every=1000"]
SUCCESS = 0.7


def round_of(
    modes: Sequence[str], iterations: int, number: int, folder: Path, size: list[str]
) -> dict[str, Measured]:
    measured = {}
    for mode in modes:
        words = [f"run.mode={mode}", MODES[mode], f"run.seed={number}", *SLOW, *LONG, *size, *BARE]
        words.append(f"run.iterations={WARM_UP + iterations + CLOSING}")
        measured[mode] = measure(CONFIG, folder, f"{mode}-{number}", words)
        one = measured[mode]
        print(f"round {number} {mode}: {one.seconds:.2f} s, {one.trained_per_s:.0f} tokens/s", flush=True)
    return measured


def speed(rounds: list[dict[str, Measured]]) -> list[dict[str, Any]]:
    ours = [one["rollart"] for one in rounds]
    rows = []
    modes = list(rounds[0])
    for mode in modes:
        if mode == "rollart":
            continue
        theirs = [one[mode] for one in rounds]

        rows.append(compared(ours, theirs, mode, "step time", "s", lambda m: m.seconds, higher_is_better=False))
        rows.append(
            compared(
                ours,
                theirs,
                mode,
                "trained tokens per second",
                "1/s",
                lambda m: m.trained_per_s,
                higher_is_better=True,
            )
        )
    for mode in modes:
        runs = [one[mode] for one in rounds]
        for metric, values in (
            ("evicted as stale", [m.stale for m in runs]),
            ("beyond the bound", [m.over for m in runs]),
        ):
            rows.append(
                {"metric": f"trajectories {metric}, {mode}", "unit": "%", "ours": 100 * statistics.mean(values)}
            )
        share = statistics.mean(m.driver_share for m in runs)
        rows.append({"metric": f"driver's CPU, of the wall time, {mode}", "unit": "%", "ours": 100 * share})
        for part in ("get_batch", "train", "wait_weights", "suspend", "update", "resume", "probe"):
            share = statistics.mean(m.parts.get(part, 0.0) / m.seconds for m in runs)
            rows.append({"metric": f"share of step time, {mode}: {part}", "unit": "%", "ours": 100 * share})
    return rows


def learned(mode: str, seed: int, folder: Path) -> float:
    """Seconds of training until an evaluation on held-out lakes reached the success rate."""
    name = f"learn-{mode}-{seed}"
    words = [f"run.mode={mode}", MODES[mode], f"run.seed={seed}", "eval.every=2", f"run.stop_at_success={SUCCESS}"]
    measure(CONFIG, folder, name, [*words, *SLOW, "run.iterations=60"])
    last = read_metrics(folder / name)[-1]
    return float(last["time"] or 0) if float(last["eval/success"] or 0) >= SUCCESS else float("inf")


def learning(folder: Path, seeds: int) -> list[dict[str, Any]]:
    rows = []
    for seed in range(seeds):
        ours, theirs = (learned(mode, seed, folder) for mode in ("rollart", "areal"))
        rows.append(
            {
                "metric": f"time to success {SUCCESS:g}, seed {seed}",
                "unit": "s",
                "ours": ours,
                "peer": "areal",
                "peer_value": theirs,
                "ratio": theirs / ours,
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of two counted iterations")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="a third of the batch")
    parser.add_argument("--against", choices=[mode for mode in MODES if mode != "rollart"], help="this mode only")
    parser.add_argument("--learn", action="store_true", help="time to a success rate instead of speed")
    parser.add_argument("--seeds", type=int, default=2, help="of --learn")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.learn:
            command = f"python benchmarks/end_to_end/modes.py --learn --seeds {arguments.seeds}"
            write("modes_learning", command, learning(Path(folder), arguments.seeds))
            return 0
        iterations, size = (2 if arguments.quick else ITERATIONS), (SMALL if arguments.small else LARGE)
        numbers = range(1 if arguments.quick else arguments.rounds)
        modes = ("rollart", arguments.against) if arguments.against else tuple(MODES)
        rounds = [round_of(modes, iterations, number, Path(folder), size) for number in numbers]
    how = (" --small" if arguments.small else "") + (" --quick" if arguments.quick else "")
    how += f" --rounds {arguments.rounds}" if arguments.rounds != 3 else ""
    how += f" --against {arguments.against}" if arguments.against else ""
    name = "_".join(filter(None, ("modes", "small" if arguments.small else "", arguments.against)))
    write(name, f"python benchmarks/end_to_end/modes.py{how}", speed(rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
