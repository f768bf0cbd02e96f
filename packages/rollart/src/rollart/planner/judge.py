"""Simulates candidates, several at a time where there are cores, and tells a difference from noise.

All candidates play the same seed, so largely the same episodes. What is left of the scatter of their iterations says
how much two means must differ. Invariants (tests/rollart/test_rollart_planner_judge.py): what comes out does not
depend on how many simulations run at a time; when judging ends, however it ends, no process is left.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import sqrt
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from msgspec import Struct

from rollart.planner.candidate import Candidate
from rollart.planner.estimate import estimate
from rollart.planner.shrink import shrunk
from rollart.runtime.folder import RunFolder
from rollart.simulate.config import make_simulation
from rollart.simulate.run import Simulated, simulate
from rollart.simulate.summary import Summary, summarize

_SURE = 2.0
"""Standard errors that a difference must exceed."""
_BLOCKS = 8


class Failed(Struct, frozen=True):
    """A candidate whose simulation did not come to an end."""

    candidate: Candidate
    why: str


class Judged(Struct, frozen=True):
    """A candidate, what the closed form said of it, and what the simulation of one in `by` of it came to."""

    candidate: Candidate
    by: int
    estimated_s: float
    summary: Summary
    simulated: Simulated


def judge(
    tree: Mapping[str, Any], candidate: Candidate, iterations: int, by: int = 1, within: str | None = None
) -> Judged:
    """Simulate one in `by` of a candidate for `by` times so many iterations, with files in a folder of `within`."""
    whole = candidate.tree(tree)
    part = shrunk(whole, by) if by > 1 else whole
    part["run"] = {**part.get("run", {}), "iterations": iterations * by}
    simulation = make_simulation(part)
    with tempfile.TemporaryDirectory(dir=within) as place:
        folder = RunFolder(Path(place) / "run")
        folder.create(simulation.config)
        try:
            simulated = simulate(simulation, folder)
        finally:
            folder.close()
    estimated = estimate(make_simulation(whole)).step
    return Judged(candidate, by, estimated, summarize(simulation, simulated), simulated)


class Judges:
    """Judges candidates of one configuration, each once. `tell` hears of each, with the time so far and what is left.

    More than one of `processes` are children: give each what one simulation takes (half a GiB for 3,000 devices).
    """

    def __init__(self, tree: Mapping[str, Any], processes: int, tell: Callable[[str], None]) -> None:
        self.coming = 0
        """Iterations that are expected to be simulated after those that are asked for now."""
        self.by = 1
        """One in how many of everything is simulated, for so many times the iterations."""
        self.known: dict[tuple[Candidate, int], Judged] = {}
        self.failed: list[Failed] = []
        self._tree = tree
        self._processes = processes
        self._tell = tell
        self._began = time.monotonic()
        self._spent = 0.0
        self._iterations = 0

    def all(self, candidates: Sequence[Candidate], iterations: int) -> list[Judged]:
        """In the order of `candidates`, without those that failed, which are told too and not tried again."""
        failed = {one.candidate for one in self.failed}
        todo = [one for one in dict.fromkeys(candidates) if one not in failed and (one, iterations) not in self.known]
        several = self._processes > 1 and len(todo) > 1
        judging = self._apart(todo, iterations) if several else self._here(todo, iterations)
        left, start = len(todo), time.monotonic()
        for one in judging:
            if isinstance(one, Failed):
                self.failed.append(one)
            else:
                self.known[one.candidate, iterations] = one
            left -= 1
            self._iterations += iterations
            spent = self._spent + time.monotonic() - start
            pace = spent / self._iterations
            self._say(one, pace * (left * iterations + self.coming))
        self._spent += time.monotonic() - start
        return [self.known[one, iterations] for one in candidates if (one, iterations) in self.known]

    def _say(self, one: Judged | Failed, left: float) -> None:
        times = f"{_clock(time.monotonic() - self._began)}, about {_clock(left)} left"
        if isinstance(one, Failed):
            self._tell(f"{times:26} {'failed':>8}           {one.candidate.words}: {one.why}")
        else:
            self._tell(f"{times:26} {one.summary.step_s:8.1f} s a step  {one.candidate.words}")

    def _here(self, todo: Sequence[Candidate], iterations: int) -> Iterator[Judged | Failed]:
        """One after the other, in this process."""
        for candidate in todo:
            try:
                yield judge(self._tree, candidate, iterations, self.by)
            except Exception as error:
                yield Failed(candidate, _told(error))

    def _apart(self, todo: Sequence[Candidate], iterations: int) -> Iterator[Judged | Failed]:
        """As they end, each in a process of its own. Their files lie in one folder, which ends with this process."""
        waiting = list(reversed(todo))
        running: dict[Connection, tuple[Candidate, BaseProcess]] = {}
        with tempfile.TemporaryDirectory() as place:
            try:
                while waiting or running:
                    while waiting and len(running) < self._processes:
                        candidate = waiting.pop()
                        ear, process = _start(self._tree, candidate, iterations, self.by, place)
                        running[ear] = candidate, process
                    ready = wait(list(running))
                    for ear in [one for one in running if one in ready]:
                        yield _heard(ear, *running.pop(ear))
            finally:
                for _, process in running.values():
                    process.kill()
                    process.join()


def _start(
    tree: Mapping[str, Any], candidate: Candidate, iterations: int, by: int, place: str
) -> tuple[Connection, BaseProcess]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ear, mouth = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(mouth, tree, candidate, iterations, by, place), daemon=True)
    process.start()
    mouth.close()
    return ear, process


def _work(
    mouth: Connection, tree: Mapping[str, Any], candidate: Candidate, iterations: int, by: int, place: str
) -> None:
    """In the child: what the parent should know of an error is its text."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told too, and ends this
    signal.signal(signal.SIGTERM, _stop)
    logging.getLogger().setLevel(logging.ERROR)  # what fails in a simulated world is no news
    multiprocessing.set_start_method("fork", force=True)  # the locks of a metrics writer have no name then to be left
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    try:
        try:
            answer: Judged | str = judge(tree, candidate, iterations, by, place)
        except Exception as error:
            answer = _told(error)
        mouth.send(answer)
    except (_Orphaned, BrokenPipeError):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        shutil.rmtree(place, ignore_errors=True)  # here, where nothing is simulated any more that makes files
        os._exit(1)


class _Orphaned(SystemExit):
    """Nobody would hear the answer. An event loop lets none through but this and the keyboard's interrupt."""


def _stop(*_: object) -> None:
    raise _Orphaned


def _stop_with_parent() -> None:
    """A parent that was killed could end nobody."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "only children call this"
    parent.join()
    while True:  # an exception that comes in a destructor is lost
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1.0)


def _heard(ear: Connection, candidate: Candidate, process: BaseProcess) -> Judged | Failed:
    """What a child said before it ended."""
    try:
        answer = ear.recv()
    except EOFError:
        answer = None
    ear.close()
    process.join()
    if isinstance(answer, Judged):
        return answer
    unsaid = f"its process ended with exit code {process.exitcode}; with fewer --processes each has more memory"
    return Failed(candidate, answer or unsaid)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def scatter(rows: Sequence[Sequence[float]]) -> float:
    """The standard deviation of a number over its row's mean, without what is common to its column. A row is a
    candidate's; all play the same episodes.
    """
    even = [[value * len(row) / sum(row) for value in row] for row in rows]
    shared = [sum(column) / len(column) for column in zip(*even, strict=True)]
    free = (len(rows) - 1) * (len(shared) - 1)
    if free < 1:
        return 0.0
    return sqrt(sum((value - mean) ** 2 for row in even for value, mean in zip(row, shared, strict=True)) / free)


def margin(judged: Sequence[Judged]) -> float:
    """The part by which one mean must be below another to be more than noise. All have run equally long."""
    rows = [blocks(one.summary.steps) for one in judged]
    return _SURE * scatter(rows) * sqrt(2 / len(rows[0]))


def blocks(steps: Sequence[float]) -> list[float]:
    """Means of some iterations in a row: a short one follows a long one, so those that are looked at alone make means
    seem less sure than they are.
    """
    size = max(1, len(steps) // _BLOCKS)
    return [sum(steps[start : start + size]) / size for start in range(0, len(steps) - size + 1, size)]


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
