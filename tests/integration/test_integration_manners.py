"""How a run ends: by Ctrl-C, by a killed worker, by a resume. Nothing is left behind, and nothing hangs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from rollart.observe.metrics import Row, read_metrics
from rollart.observe.runinfo import read_run

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

CONFIG = """
run: {name: manners, iterations: 40}
generation: {workers: 1}
buffer: {batch_groups: 4, group_size: 4, drop_uniform: false}
rollout: {concurrency: 16}
eval: {every: 100, episodes: 16}
checkpoint: {every: 100}
"""
START_S = 400
COMMAND = ("-m", "rollart.cli.main")
# `rollart` of which a process is killed at one moment: as a method is called for the second time.
KILLED = """
import os, signal, sys, psutil
from {module} import {name} as Asked
from rollart.cli.main import main

calls = 0

def killed(member):
    found = psutil.Process(member.pid)
    if {core}:
        found, = [child for child in found.children(recursive=True) if child.name().startswith("VLLM::Eng")]
    os.kill(found.pid, signal.SIGKILL)

def unlucky(asked, *arguments):
    global calls
    calls += 1
    if calls == 2:
        killed({member})
    return was(asked, *arguments)

was, Asked.{method} = Asked.{method}, unlucky
sys.exit(main())
"""
ENGINE = {"module": "rollart.distributed.ray_worker", "name": "RayWorker", "member": "asked._member", "core": False}
PROBE = ENGINE | {"module": "rollart.pipeline.probe", "name": "ParityProbe", "member": "asked._engines[0]._member"}
MOMENTS = {
    "its update": ENGINE | {"method": "_update"},
    "its update, the core alone": ENGINE | {"method": "_update", "core": True},
    "its prefetch, the core alone": ENGINE | {"method": "prefetch", "core": True},
    "its pause": ENGINE | {"method": "pause"},
    "its resume, the core alone": ENGINE | {"method": "resume", "core": True},
    "its probe": PROBE | {"method": "measure"},
}
SAVING = ENGINE | {
    "module": "rollart.roles.train_client",
    "name": "TrainClient",
    "method": "save",
    "member": "asked._cluster.members[0]",
}
ALWAYS = ("its update", "its update, the core alone")
MARK = "ROLLART_TEST_RUN"


class Driver:
    """A `rollart train` in a session of its own, and the processes that carry its mark."""

    def __init__(self, folder: Path, *words: str, command: Sequence[str] = COMMAND) -> None:
        config = folder / "config.yaml"
        config.write_text(CONFIG)
        self.run = folder / "runs" / "manners"
        self.mark = uuid.uuid4().hex
        self.output = folder / f"{self.mark}.log"
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    *command,
                    "train",
                    str(config),
                    f"run.folder={folder / 'runs'}",
                    *words,
                ],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, MARK: self.mark},
                start_new_session=True,
            )

    def text(self) -> str:
        return self.output.read_text()

    def wait_for(self, pattern: str, within: float = START_S) -> None:
        """Until the driver has printed `pattern`; it prints whole lines and nothing else can be waited on."""
        deadline = time.monotonic() + within
        while not re.search(pattern, self.text()):
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.text()}"
            assert time.monotonic() < deadline, f"no {pattern!r} in {within} s:\n{self.text()}"
            time.sleep(0.1)

    def interrupt(self) -> None:
        """What a terminal does: the signal goes to the whole foreground group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def ended(self, within: float) -> int:
        return self.process.wait(within)

    def left(self) -> list[str]:
        """Command lines of processes that this run started and that are still there."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    if f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes():
                        found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
                except (OSError, PermissionError):
                    continue
        return [line for line in found if line]

    def nothing_left(self, within: float = 15) -> bool:
        """Kernels take a moment to end a killed process."""
        deadline = time.monotonic() + within
        while self.left() and time.monotonic() < deadline:
            time.sleep(0.1)
        return not self.left()

    def engine(self, started: int = 0) -> int:
        """The process id of the generation actor, when it was started for the so many-th time after the first."""
        found = re.findall(r"MainProcess pid=(\d+)", (self.run / "logs" / "gen-0.log").read_text())
        pids = list(dict.fromkeys(found))
        assert len(pids) > started, f"the engine's log names the processes {pids}"
        return int(pids[started])


def check_ledger(row: Row) -> None:
    ended = ("delivered", "surplus", "stale", "filtered", "failed", "cancelled", "running", "buffered")
    assert row["ledger/issued"] == sum(row[f"ledger/{column}"] or 0 for column in ended)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[object]:
    drivers: list[Driver] = []

    def begin(*words: str, **options: Sequence[str]) -> Driver:
        drivers.append(Driver(tmp_path, *words, **options))
        return drivers[-1]

    yield begin
    for driver in drivers:
        if driver.process.poll() is None:
            driver.process.kill()
        driver.process.wait()


def test_interrupt_leaves_a_checkpoint_that_a_resume_goes_on_from(start) -> None:
    first = start()
    first.wait_for(r"\[3/40\]")
    first.interrupt()
    assert first.ended(within=60) == 130
    assert first.nothing_left(), first.left()
    info = read_run(first.run)
    assert info is not None
    assert info.status == "interrupted"
    assert (first.run / "report.html").exists()
    before = read_metrics(first.run)
    steps = [entry.name for entry in (first.run / "checkpoints").iterdir()]
    assert steps == [f"step-{before[-1]['step']:06d}"]

    total = int(before[-1]["step"] or 0) + 3
    second = start("--resume", f"run.iterations={total}")
    assert second.ended(within=START_S) == 0, second.text()
    assert second.nothing_left(), second.left()
    rows = read_metrics(first.run)
    assert rows[: len(before)] == before
    assert [row["step"] for row in rows] == list(range(1, total + 1))
    for row in rows:
        assert (row["staleness/max"] or 0) <= 1
        assert row["ledger/failed"] == 0
        check_ledger(row)
    delivered = [row["ledger/delivered"] for row in rows]
    assert delivered == [16 * step for step in range(1, total + 1)]
    info = read_run(first.run)
    assert info is not None
    assert info.status == "finished"


@pytest.mark.parametrize(
    "moment", [pytest.param(moment, marks=() if moment in ALWAYS else pytest.mark.slow) for moment in (*MOMENTS, "")]
)
def test_a_killed_engine_is_replaced_and_the_run_goes_on(start, moment: str) -> None:
    """Both proxies lose it, and one load mends it for both; where it was the only one, they wait for it."""
    command = ("-c", KILLED.format(**MOMENTS[moment])) if moment else COMMAND
    driver = start("run.iterations=6", "generation.proxies=2", command=command)
    driver.wait_for(r"\[2/6\]")
    if not moment:
        os.kill(driver.engine(), signal.SIGKILL)
    assert driver.ended(within=START_S) == 0, driver.text()
    assert driver.nothing_left(), driver.left()
    assert driver.engine(started=1) != driver.engine()
    rows = read_metrics(driver.run)
    assert [row["step"] for row in rows] == list(range(1, 7))
    for row in rows:
        check_ledger(row)
        assert (row["staleness/max"] or 0) <= 1
    assert rows[-1]["ledger/delivered"] == 16 * 6
    assert (rows[2]["parity/max_abs"] is None) == (moment == "its probe")


@pytest.mark.slow
def test_a_trainer_that_is_killed_as_it_saves_leaves_the_checkpoint_before(start) -> None:
    words = ("run.iterations=6", "checkpoint.every=2")
    first = start(*words, command=("-c", KILLED.format(**SAVING)))
    assert first.ended(within=START_S) == 1
    assert "the run failed: train-0" in first.text()
    assert "to go on after iteration 2: rollart resume" in first.text()
    assert first.nothing_left(), first.left()
    second = start("--resume", *words)
    assert second.ended(within=START_S) == 0, second.text()
    rows = read_metrics(second.run)
    assert [row["step"] for row in rows] == list(range(1, 7))
    for row in rows:
        check_ledger(row)
    assert rows[-1]["ledger/delivered"] == 16 * 6


def test_a_worker_that_is_dead_for_good_ends_the_run_with_its_name(start) -> None:
    driver = start("generation.restarts=0")
    driver.wait_for(r"\[2/40\]")
    os.kill(driver.engine(), signal.SIGKILL)
    assert driver.ended(within=30) == 1
    assert "gen-0" in driver.text()
    assert "is dead" in driver.text()
    assert driver.nothing_left(), driver.left()
    info = read_run(driver.run)
    assert info is not None
    assert info.status == "failed"
    assert "gen-0" in info.reason


def test_a_second_interrupt_ends_at_once(start) -> None:
    driver = start()
    driver.wait_for("starting 1 vLLM engine")
    driver.interrupt()
    driver.wait_for("stopping")
    driver.interrupt()
    assert driver.ended(within=5) == 130
    assert driver.nothing_left(), driver.left()


def test_a_killed_driver_leaves_no_process(start) -> None:
    driver = start()
    driver.wait_for("starting 1 vLLM engine")
    driver.process.kill()
    driver.process.wait()
    assert driver.nothing_left(), driver.left()
