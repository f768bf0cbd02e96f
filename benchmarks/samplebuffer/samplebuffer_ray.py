"""The Ray face against queues: trajectories a second from a producer process to a consumer process.

Ours carries a whole life (ticket, stamp, finish, hand-out in whole groups); a peer an item through put and get.
Where a peer can batch, it sends as many items in a call as there are producers, and takes a batch in a call. All
systems run in turn, round by round. Reverb and TransferQueue get environments of their own in a temporary folder,
kept for the next run; with --quick they take part only when these exist.

python benchmarks/samplebuffer/samplebuffer_ray.py [--quick]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from _results import Row, write

HERE = Path(__file__).resolve().parent
PEERS = Path(tempfile.gettempdir()) / "samplebuffer-peers"
INSTALL_LIMIT_S, START_LIMIT_S = 1200, 300
NEEDS = {
    "Reverb 0.14": ["dm-reverb[tensorflow]==0.14.0", "numpy<2", "psutil"],
    "TransferQueue 0.1.11": ["transferqueue==0.1.11", "psutil"],
}
KB, MB = 2**10, 2**20


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


def main() -> None:
    quick = "--quick" in sys.argv
    on_ray = Runner(sys.executable, "_on_ray.py")
    runners = {"ours": on_ray, "Ray Queue": on_ray, "Redis list": Runner(sys.executable, "_redis.py")}
    missing: dict[str, str] = {}
    for peer, script in (("Reverb 0.14", "_reverb.py"), ("TransferQueue 0.1.11", "_transferqueue.py")):
        python, reason = environment(peer, quick)
        if python:
            runners[peer] = Runner(python, script)
        else:
            missing[peer] = reason
    cases = [
        (4 * KB, 64, 1024 if quick else 8192),
        (MB, 64, 128 if quick else 512),
        (4 * KB, 1, 64 if quick else 512),
        (MB, 1, 64 if quick else 128),
    ]
    taken: dict[tuple[int, int, str], list[dict[str, float]]] = {}
    deadline = float("inf")
    for turn in range(-1, 3 if quick else 7):  # the first warms up
        if turn == 0:
            deadline = time.monotonic() + (100 if quick else 3600)
        for payload, producers, items in cases:
            for name, runner in runners.items():
                if time.monotonic() > deadline:
                    continue
                job: dict[str, Any] = {
                    "payload": payload,
                    "producers": producers,
                    "items": items if turn >= 0 else 64,
                    "batch": 64,
                }
                if runner is on_ray:
                    job["system"] = "ours" if name == "ours" else "queue"
                answer = runner.run(job)
                print(turn, name, job, answer, file=sys.stderr)
                if turn >= 0:
                    per_item = {key: value / items for key, value in answer.items()}
                    taken.setdefault((payload, producers, name), []).append(per_item)
    for runner in {id(runner): runner for runner in runners.values()}.values():
        runner.close()
    write(Path(__file__), list(rows(cases, runners, missing, taken)), quick)


def rows(
    cases: list[tuple[int, int, int]],
    runners: dict[str, Runner],
    missing: dict[str, str],
    taken: dict[tuple[int, int, str], list[dict[str, float]]],
) -> list[Row]:
    made = []
    for payload, producers, _ in cases:
        size = "1 MB" if payload == MB else "4 KB"
        metric = f"{size}, {producers} producer{'s' if producers > 1 else ''}"
        for peer in (name for name in runners if name != "ours"):
            ours, theirs = taken.get((payload, producers, "ours")), taken.get((payload, producers, peer))
            if ours and theirs:
                rates = [1 / item["seconds"] for item in ours]
                made.append(Row.against(metric, "1/s", rates, peer, median(1 / item["seconds"] for item in theirs)))
                cpu, peers = [item["cpu"] * 1e6 for item in ours], median(item["cpu"] * 1e6 for item in theirs)
                made.append(Row.against(f"{metric}, all processes", "us CPU", cpu, peer, peers, less=True))
    for peer, reason in missing.items():
        made.append(Row(metric="all", unit="1/s", ours=None, peer=peer, spread=reason))
    return made


if __name__ == "__main__":
    main()
