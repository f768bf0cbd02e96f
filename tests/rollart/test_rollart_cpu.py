"""CPU seconds by role: of real processes, their children and those that were started anew."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rollart.runtime.cpu import CpuClock

BURN = "import sys, time\nwhile time.process_time() < {}: pass\nprint('done', flush=True)\nsys.stdin.read()"
CHILD = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', {!r}])"


@contextmanager
def burning(seconds: float, through_a_child: bool = False) -> Iterator[int]:
    """A process that has computed so long, by itself or in a child, and waits."""
    code = BURN.format(seconds)
    command = [sys.executable, "-c", CHILD.format(code) if through_a_child else code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.stdin.close()


@pytest.mark.seconds
def test_each_role_has_its_processes_and_their_children() -> None:
    with burning(0.3) as engine, burning(0.6, through_a_child=True) as trainer:
        spent = CpuClock({"engines": lambda: [engine], "trainer": lambda: [trainer]})()
    assert 0.25 < spent["engines"] < 0.55 < spent["trainer"] < 1.2
    assert spent["driver"] > 0


def test_a_process_that_ended_stays_counted_and_its_successor_adds() -> None:
    pids: list[int] = []
    clock = CpuClock({"engines": lambda: pids})
    with burning(0.3) as first:
        pids[:] = [first]
        before = clock()["engines"]
    assert clock()["engines"] == before >= 0.25
    with burning(0.3) as second:
        pids[:] = [second]
        assert clock()["engines"] >= before + 0.25


def test_a_worker_that_has_not_started_is_nobody() -> None:
    assert CpuClock({"engines": lambda: [0]})()["engines"] == 0.0
