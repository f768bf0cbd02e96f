"""A run whose parts are killed goes on, or resumes from its checkpoint; nothing is lost, repeated or too old.

Each part is killed with signal 9 at a moment that the seed chooses, in a run of thirty iterations.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from rollart.observe.metrics import read_metrics

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]

ITERATIONS = 30
BATCH = 16
CONFIG = f"""
run: {{name: chaos, iterations: {ITERATIONS}}}
generation: {{workers: 2}}
buffer: {{batch_groups: 4, group_size: 4, drop_uniform: false, spare_members: 1}}
rollout: {{concurrency: 24}}
weights: {{timeout_s: 20}}
eval: {{every: 100, episodes: 8}}
checkpoint: {{every: 1}}
"""
MARK = "ROLLART_CHAOS_RUN"
# What a process of the run has in its command line, or among its open files.
PARTS = {
    "driver": "rollart.cli.main",
    "engine": "logs/gen-0.log",
    "trainer": "logs/train-0.log",
    "metadata": "valkey-server",
    "store": "mooncake_master",
}
ATTEMPT_S = 600


class Attempt:
    """One process of `rollart train`, started anew or resuming."""

    def __init__(self, folder: Path, *, resume: bool) -> None:
        config = folder / "config.yaml"
        config.write_text(CONFIG)
        self.mark = uuid.uuid4().hex
        self.output = folder / f"{self.mark}.log"
        words = ["--resume"] if resume else []
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rollart.cli.main", "train", str(config), f"run.folder={folder}", *words],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, MARK: self.mark},
                start_new_session=True,
            )

    def reached(self, step: int) -> bool:
        """Wait until the run has finished `step`; False when it ended before."""
        deadline = time.monotonic() + ATTEMPT_S
        while not re.search(rf"\[{step}/{ITERATIONS}\]", self.output.read_text()):
            if self.process.poll() is not None:
                return False
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.05)
        return True

    def part(self, name: str) -> int:
        """The process id of a part."""
        found = [pid for pid in self._processes() if _is(pid, PARTS[name])]
        assert found, f"no process of this run is its {name}"
        return found[0]

    def nothing_left(self) -> bool:
        deadline = time.monotonic() + 20
        while (left := list(self._processes())) and time.monotonic() < deadline:
            time.sleep(0.1)
        return not left

    def _processes(self) -> list[int]:
        mark = f"{MARK}={self.mark}".encode()
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        return [pid for pid in pids if mark in _read(pid, "environ")]


def _read(pid: int, what: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes()
    except OSError:
        return b""


def _is(pid: int, name: str) -> bool:
    if name.encode() in _read(pid, "cmdline").replace(b"\0", b" "):
        return True
    try:
        return any(os.readlink(link).endswith(name) for link in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False


@pytest.mark.parametrize("part", PARTS)
def test_a_killed_part_costs_time_and_nothing_else(tmp_path: Path, part: str) -> None:
    step = random.Random(part).randint(2, ITERATIONS - 5)
    attempt = Attempt(tmp_path, resume=False)
    try:
        assert attempt.reached(step), attempt.output.read_text()
        os.kill(attempt.part(part), signal.SIGKILL)
        resumes = 0
        while attempt.process.wait(ATTEMPT_S) != 0:
            assert attempt.nothing_left()
            resumes += 1
            assert resumes <= 2, attempt.output.read_text()
            attempt = Attempt(tmp_path, resume=True)
        assert attempt.nothing_left()
    finally:
        if attempt.process.poll() is None:
            attempt.process.kill()
        attempt.process.wait()
    check(tmp_path / "chaos")


def check(run: Path) -> None:
    """Every iteration once, the ledger balanced in each, whole batches, nothing beyond the bound."""
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == list(range(1, ITERATIONS + 1))
    ends = ("delivered", "surplus", "stale", "filtered", "failed", "cancelled", "running", "buffered")
    for row in rows:
        assert row["ledger/issued"] == sum(row[f"ledger/{column}"] or 0 for column in ends)
        assert row["ledger/delivered"] == BATCH * (row["step"] or 0)
        assert (row["staleness/max"] or 0) <= 1
        assert row["staleness/over"] == 0
        assert row["parity/max_abs"] is None or row["parity/max_abs"] < 1e-3
