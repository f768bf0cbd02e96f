"""How many simulations run at a time changes nothing, nothing is left behind, and noise is no difference."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from re import fullmatch, search
from typing import Any

import msgspec
import pytest

from rollart.planner.candidate import Candidate, Part
from rollart.planner.judge import Failed, Judged, Judges, _heard, _start, blocks, judge, margin, scatter
from rollart.simulate.run import Simulated
from rollart.simulate.summary import Summary

pytestmark = pytest.mark.seconds

TREE: dict[str, Any] = {
    "run": {"name": "judged", "iterations": 3},
    "tasks": {"Math": {"kind": "env", "env": "sim:math", "max_tokens": 2048, "max_turns": 3}},
    "generation": {"max_model_len": 16384},
    "buffer": {"batch_groups": 4, "group_size": 4, "alpha": 1.0, "drop_uniform": False},
    "eval": {"every": 100, "episodes": 2},
    "checkpoint": {"every": 100},
    "simulate": {
        "model": "qwen3-8b",
        "generation": [{"hardware": "H800", "gpus": 8}],
        "training": {"hardware": "H800", "gpus": 16},
        "tasks": {"Math": "gem-math"},
    },
}
FIELD = [
    Candidate((Part("H800", 24 - gpus),), Part("H800", gpus), alpha=alpha) for gpus in (8, 16) for alpha in (1, 2)
]
ENDLESS = 1_000_000
PARENT = """
import sys
import test_rollart_planner_judge as test
from rollart.planner.judge import _start
if __name__ == "__main__":
    _, process = _start(test.TREE, test.FIELD[0], test.ENDLESS, 1, sys.argv[1])
    print(process.pid, flush=True)
    process.join()
"""
IMPOSSIBLE = Candidate((Part("H800", 12, 8),), Part("H800", 8))


def judged(steps: Sequence[float]) -> Judged:
    names = ("tokens_per_s", "cost", "staleness", "stale", "push_s", "pull_s", "exposed_s")
    nothing = dict.fromkeys(names, 0.0)
    mean, counted = sum(steps) / len(steps), len(steps)
    summary = Summary(first=3, counted=counted, step_s=mean, steps=list(steps), parts={}, **nothing)
    simulated = Simulated(
        rows=[], elapsed_s=1.0, generation_used={}, training_used=0.0, rewards_used=None, turns=0, preemptions=0
    )
    return Judged(FIELD[0], 1, 0.0, summary, simulated)


def test_in_their_order_and_the_same_however_many_run_at_a_time() -> None:
    found = [Judges(TREE, processes, lambda text: None).all(FIELD, 3) for processes in (1, 3)]
    assert [one.candidate for one in found[0]] == FIELD
    assert msgspec.json.encode(found[0]) == msgspec.json.encode(found[1])


def test_each_is_simulated_once_and_told_with_the_time_that_is_left() -> None:
    told: list[str] = []
    judges = Judges(TREE, 1, told.append)
    judges.all([*FIELD, FIELD[0]], 3)
    judges.all(FIELD[::-1], 3)
    assert len(told) == len(FIELD)
    assert all(candidate.words in text for candidate, text in zip(FIELD, told, strict=True))
    assert all(fullmatch(r"\d+:\d\d, about \d+:\d\d left .*", text) for text in told)


def test_an_interruption_leaves_no_process() -> None:
    def interrupt(text: str) -> None:
        raise KeyboardInterrupt

    judges = Judges(TREE, 2, interrupt)
    with pytest.raises(KeyboardInterrupt):
        judges.all(FIELD, 3)
    assert len(judges.known) == 1
    assert not multiprocessing.active_children()


def test_an_interruption_waits_for_no_simulation() -> None:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before, start = signal.signal(signal.SIGALRM, interrupt), time.monotonic()
    signal.alarm(3)
    try:
        with pytest.raises(KeyboardInterrupt):
            Judges(TREE, 2, lambda text: None).all(FIELD, ENDLESS)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - start < 30
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("processes", [1, 2])
def test_why_one_failed_is_told_with_its_name_and_others_go_on(processes: int) -> None:
    told: list[str] = []
    judges = Judges(TREE, processes, told.append)
    assert [one.candidate for one in judges.all([FIELD[0], IMPOSSIBLE, FIELD[1]], 3)] == FIELD[:2]
    (failed,) = [text for text in told if "failed" in text]
    assert search(r"12 H800 TP8 generate.*: ConfigError: .*is not a multiple of", failed)
    assert judges.all([IMPOSSIBLE], 5) == [] and len(told) == 3  # once is enough
    assert not multiprocessing.active_children()


def test_a_run_that_ends_with_success_is_judged_to_its_last_iteration() -> None:
    early = TREE | {"run": TREE["run"] | {"stop_at_success": 0.0}}
    assert len(judge(early, FIELD[0], 3).simulated.rows) == 3


def test_a_child_that_was_killed_is_told(tmp_path: Path) -> None:
    ear, process = _start(TREE, FIELD[0], ENDLESS, 1, str(tmp_path))
    process.kill()
    failed = _heard(ear, FIELD[0], process)
    assert isinstance(failed, Failed) and "exit code -9" in failed.why


def test_children_end_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    command = [sys.executable, "-c", PARENT, str(place)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parent) as parent:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    ended, _, _ = select.select([child], [], [], 30)
    os.close(child)
    assert ended
    assert not place.exists()


def test_what_all_have_in_common_is_no_noise() -> None:
    slow = [100.0, 150.0, 90.0, 120.0]
    assert scatter([slow, [1.1 * step for step in slow]]) == pytest.approx(0.0, abs=1e-9)
    assert margin([judged(slow)]) == 0.0  # nothing to compare


def test_long_runs_are_looked_at_in_blocks() -> None:
    assert blocks([1.0, 3.0]) == [1.0, 3.0]
    assert blocks([1.0, 3.0] * 8 + [7.0]) == [2.0] * 8
    there, back = [100.0, 120.0] * 16, [120.0, 100.0] * 16
    assert margin([judged(there), judged(back)]) == pytest.approx(0.0, abs=1e-9)


def test_a_margin_is_seldom_passed_by_chance_and_narrows_with_length() -> None:
    random = Random(1)

    def field(counted: int) -> list[Judged]:
        return [judged([random.gauss(100, 5) for _ in range(counted)]) for _ in range(8)]

    def passed(field: list[Judged]) -> bool:
        first, second = (one.summary.step_s for one in field[:2])
        return max(first, second) > min(first, second) * (1 + margin(field))

    assert sum(passed(field(4)) for _ in range(400)) / 400 == pytest.approx(0.05, abs=0.03)
    assert margin(field(4)) == pytest.approx(2 * 0.05 * (2 / 4) ** 0.5, rel=0.4)
    assert margin(field(64)) == pytest.approx(margin(field(4)) / 4, rel=0.4)
