"""The Ray face against queues: trajectories a second from a producer process to a consumer process.

Ours carries a whole life: 64 producers are coroutines of one process, each asks for a ticket, stamps and finishes it,
and the consumer takes batches of whole groups of 8. A peer carries items through put and get, with no tickets,
groups, bound or ledger; its producers are one loop in one process that sends many items in a call. With 64 producers
each peer runs twice: 64 items in a call, one of each producer, and a whole batch in a call. With one producer it
sends an item at a time. Consumers take a batch in a call. Queues hold four batches at most. Payloads are random
bytes, made before the measured window, the same ones again and again; that each arrives with its length is checked.
Reverb compresses them in vain and has no switch for it.

"bare Ray" is the floor of a buffer in a Ray actor that passes references: what the calls to Ray cost alone, for one
put, two calls and a get a batch, with no buffer behind them. All systems run in turn, round by round. Reverb and
TransferQueue get environments of their own in a temporary folder, kept for the next run; with --quick they take part
only when these exist.

python benchmarks/samplebuffer/samplebuffer_ray.py [--quick]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from _results import Row, write

HERE = Path(__file__).resolve().parent
PEERS = Path(tempfile.gettempdir()) / "samplebuffer-peers"
INSTALL_LIMIT_S, START_LIMIT_S = 1200, 300
NEEDS = {
    "Reverb 0.14": ["dm-reverb[tensorflow]==0.14.0", "numpy<2", "psutil"],
    "TransferQueue 0.1.11": ["transferqueue==0.1.11", "psutil"],
}
KB, MB = 2**10, 2**20
FLOOR = "bare Ray"


class Runner:
    """A process that runs jobs of one or more systems."""

    def __init__(self, python: str, script: str) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
        self.process = subprocess.Popen(
            [python, str(HERE / script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
        )

    def run(self, job: dict[str, Any]) -> dict[str, float]:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:  # some libraries print
            if line.startswith("{"):
                answer: dict[str, float] = json.loads(line)
                return answer
        raise RuntimeError(f"{self.process.args!r} ended with {self.process.wait()}")

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(60)


def environment(peer: str, quick: bool) -> tuple[str, str]:
    """The peer's Python, or why there is none."""
    home = PEERS / peer.split()[0].lower()
    python = home / "bin" / "python"
    if (home / "ready").exists():
        return str(python), ""
    if quick:
        return "", "not installed: run without --quick first"
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    command = [str(python), "-m", "pip", "install", "-q", *NEEDS[peer]]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return "", f"not installed: pip took over {INSTALL_LIMIT_S} s"
    if done.returncode:
        return "", f"not installed: {done.stderr.strip().splitlines()[-1][:200]}"
    (home / "ready").touch()
    return str(python), ""


class Case(NamedTuple):
    """What is carried."""

    payload: int
    producers: int
    items: int
    batch: int

    @property
    def metric(self) -> str:
        size = "1 MB" if self.payload == MB else "4 KB"
        return f"{size}, {self.producers} producer{'s' if self.producers > 1 else ''}"

    def jobs(self, system: str) -> dict[str, dict[str, Any]]:
        """The jobs of a system by the name of its row; their number of items is that of a measured round."""
        job = {"payload": self.payload, "producers": self.producers, "items": self.items, "batch": self.batch}
        if system in ("ours", FLOOR):
            many = system == "ours" or self.producers > 1
            return {system: job | {"system": system, "send": self.batch}} if many else {}
        sends = {min(self.producers, self.batch), self.batch if self.producers > 1 else 1}
        named = {f"{system}, {n} in a call" if n > 1 else system: n for n in sorted(sends)}
        return {name: job | {"system": system, "send": n} for name, n in named.items()}


def main() -> None:
    quick = "--quick" in sys.argv
    on_ray = Runner(sys.executable, "_on_ray.py")
    runners = {"ours": on_ray, FLOOR: on_ray, "Ray Queue": on_ray, "Redis list": Runner(sys.executable, "_redis.py")}
    missing: dict[str, str] = {}
    for peer, script in (("Reverb 0.14", "_reverb.py"), ("TransferQueue 0.1.11", "_transferqueue.py")):
        python, reason = environment(peer, quick)
        if python:
            runners[peer] = Runner(python, script)
        else:
            missing[peer] = reason
    cases = [
        Case(4 * KB, 64, 2048 if quick else 8192, 512),
        Case(MB, 64, 128 if quick else 512, 64),
        Case(4 * KB, 1, 64 if quick else 128, 64),
        Case(MB, 1, 64, 64),
    ]
    taken: dict[Case, dict[str, list[dict[str, float]]]] = {case: {} for case in cases}
    deadline = float("inf")
    for turn in range(-1, 3 if quick else 7):  # the first warms up
        if turn == 0:
            deadline = time.monotonic() + (100 if quick else 300)
        for case in cases:
            for system, runner in runners.items():
                for name, job in case.jobs(system).items():
                    if time.monotonic() > deadline:
                        continue
                    answer = runner.run(job)
                    print(turn, name, job, answer, file=sys.stderr)
                    if turn >= 0:
                        taken[case].setdefault(name, []).append({k: v / case.items for k, v in answer.items()})
    for runner in {id(runner): runner for runner in runners.values()}.values():
        runner.close()
    write(Path(__file__), list(rows(missing, taken)), quick)


def rows(missing: dict[str, str], taken: dict[Case, dict[str, list[dict[str, float]]]]) -> Iterator[Row]:
    for case, systems in taken.items():
        ours = systems.pop("ours", [])
        for peer, theirs in systems.items() if ours else ():
            rates = [1 / item["seconds"] for item in ours]
            yield Row.against(case.metric, "1/s", rates, peer, median(1 / item["seconds"] for item in theirs))
            cpu, peers = [item["cpu"] * 1e6 for item in ours], median(item["cpu"] * 1e6 for item in theirs)
            yield Row.against(f"{case.metric}, all processes", "us CPU", cpu, peer, peers, less=True)
    for peer, reason in missing.items():
        yield Row(metric="all", unit="1/s", ours=None, peer=peer, spread=reason)


if __name__ == "__main__":
    main()
