"""Sample run folders, written by the recorders themselves with the numbers of a plausible run."""

from __future__ import annotations

import json
import math
import random
from contextlib import closing
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollart.observe import MetricsWriter, RunInfo, StepClock, Trace, histogram, write_run

HOSTILE = "</script><script>throw 1</script><img src=x onerror=alert(1)> \u2028 $data ${1} \x07 'q\" 𝔘ni " + "w" * 80


class Sample:
    """Writes a run folder as a run does: a controller's steps, two engines, sixty environments, a weight path."""

    def __init__(
        self,
        folder: Path,
        *,
        name: str = "frozenlake",
        seed: int = 0,
        iterations: int = 120,
        tasks: tuple[str, ...] = (),
        ranks: int = 1,
    ) -> None:
        self.folder, self.name, self.iterations = folder, name, iterations
        self.tasks, self.ranks = tasks, ranks
        self.random = random.Random(seed)
        self.now = 50.0
        self.clock = StepClock(lambda: self.now)
        self.issued = self.delivered = 0
        self.info = RunInfo(
            name=name,
            seed=seed,
            iterations=iterations,
            alpha=1.0,
            parity_limit=1e-3,
            started=datetime(2030, 5, 4, 10, 30, tzinfo=UTC),
        )

    def write(self) -> Path:
        folder = self.folder
        folder.mkdir(parents=True, exist_ok=True)
        write_run(folder, self.info)
        text = f"run:\n  name: {json.dumps(self.name)}\n  seed: {self.info.seed}\ntrain:\n  lr: 0.001\n"
        (folder / "config.yaml").write_text(text)
        trace = Trace(folder / "trace.json", lambda: self.now)
        with MetricsWriter(folder, tensorboard=False) as metrics:
            for step in range(1, self.iterations + 1):
                metrics.write(self.iteration(step, trace))
        trace.close()
        if self.iterations:
            ended = self.info.started + timedelta(seconds=self.now - 50) if self.info.started else None
            done = msgspec.structs.replace(
                self.info, status="finished", ended=ended, wall_s=self.now - 50, peak_memory_bytes=5_368_709_120
            )
            write_run(folder, done)
        return folder

    def step(self, trace: Trace, part: str, mean: float, resource: str = "controller") -> float:
        """One part of the iteration, timed as the controller does; returns when it began."""
        began = self.now
        with self.clock.part(part), trace.measure(resource, part):
            self.now += mean * self.random.lognormvariate(0, 0.25)
        return began

    def iteration(self, step: int, trace: Trace) -> dict[str, Any]:
        skill = 1 / (1 + math.exp(-(step - 35) / 12)) * 0.8 + 0.02
        began = self.step(trace, "get_batch", 1.3)
        exposed = 0.0
        if step > 1:
            self.step(trace, "wait_weights", 0.004)
            suspended = self.step(trace, "suspend", 0.02)
            self.step(trace, "update", 0.05, "commit")
            self.step(trace, "resume", 0.008)
            exposed = self.now - suspended
            self.step(trace, "probe", 0.03)
        self.step(trace, "train", 0.9, "train")
        self.now += 0.01
        if step % 10 == 0:
            self.step(trace, "eval", 0.8)
        self.rollout(trace, began, self.now)
        push = 0.06 * self.random.lognormvariate(0, 0.3)
        trace.span("push", f"push {step}", self.now - 0.01, self.now + push, bytes=661_000)
        trace.span("pull", f"pull {step}", self.now + push, self.now + 3 * push, worker="gen-0")
        trace.mark("train", "weights changed")
        lap = self.clock.lap()
        trace.flush(step, lap.start, lap.end)
        staleness = [self.random.choice([0, 0, 1]) if step > 1 else 0 for _ in range(128)]
        self.delivered += 128
        self.issued = self.delivered + 3 * step + 190
        row = {
            "step": step,
            "version": step - 1,
            "time": self.now - 50,
            "reward/mean": skill + self.random.gauss(0, 0.03),
            "success/mean": min(1, max(0, skill + self.random.gauss(0, 0.05))),
            "parity/max_abs": 10 ** self.random.uniform(-6.5, -5),
            "off_policy/in_flight": self.random.randint(20, 60),
            "off_policy/in_queue": self.random.randint(0, 40),
            "tokens_per_s": self.random.gauss(1500, 90),
            "push_s": push,
            "pull_accumulated_s": 2 * push,
            "pull_exposed_s": exposed,
            "push_bytes": 665_344,
            **{f"push_bytes/train-{rank}": 665_344 // self.ranks for rank in range(self.ranks)},
            "driver/cpu_s": 0.3,
            "driver/cpu_share": 0.13,
            **{f"reward/mean/{task}": skill / n + self.random.gauss(0, 0.03) for n, task in enumerate(self.tasks, 1)},
            "policy/entropy": 1.3 - skill + self.random.gauss(0, 0.02),
            "policy/loss": self.random.gauss(0, 0.02),
            "policy/grad_norm": math.nan if step == 5 else self.random.lognormvariate(0, 0.4),
            "learning_rate": 1e-3 * (1 - step / 130),
            "ledger/issued": self.issued,
            "ledger/running": 150,
            "ledger/buffered": 40,
            "ledger/delivered": self.delivered,
            "ledger/surplus": step,
            "ledger/stale": step,
            "ledger/filtered": step,
            "ledger/failed": 0,
            "ledger/cancelled": 0,
        }
        if step == 1:
            row["eval/success_before"] = 0.031
        if step % 10 == 0:
            row["eval/success"] = min(1.0, skill + self.random.gauss(0, 0.02))
            row |= {f"eval/success/{task}": max(0.0, skill / n) for n, task in enumerate(self.tasks, 1)}
        return row | lap.metrics() | histogram("staleness", staleness) | histogram("lag", [s + 1 for s in staleness])

    def rollout(self, trace: Trace, start: float, end: float) -> None:
        for worker in range(2):
            at = start
            while at < end:
                length = self.random.uniform(0.08, 0.3)
                trace.span(f"gen-{worker}", "engine busy", at, min(at + length, end), requests=64)
                at += length + self.random.expovariate(30)
        for _ in range(150):
            at = self.random.uniform(start, end)
            trace.span("env", "episode", at, at + self.random.uniform(0.2, 1.2))
        for _ in range(40):
            at = self.random.uniform(start, end)
            trace.span("reward", "reward", at, at + 0.012)


def bare(folder: Path) -> Path:
    """A run that has just begun: nothing but its description."""
    write_run(folder, RunInfo(name="just begun", iterations=120))
    return folder


def hostile(folder: Path) -> Path:
    """A run whose every name tries to break out of the page."""
    sample = Sample(folder, name=HOSTILE, iterations=1)
    sample.write()
    write_run(folder, msgspec.structs.replace(sample.info, status="failed", reason=f"worker {HOSTILE} died"))
    with closing(Trace(folder / "trace.json", lambda: sample.now)) as trace:
        row = sample.iteration(2, trace)
        for resource in ("gen-0", "controller", HOSTILE, "__proto__"):
            trace.span(resource, HOSTILE, sample.now + 0.1, sample.now + 0.5, **{HOSTILE: HOSTILE})
        trace.flush(3, sample.now, sample.now + 1)
    row |= {f"time/{HOSTILE}": 0.5, "time/__proto__": 0.5, HOSTILE: 1.0, "constructor": 2.0, "staleness/hist/x": 1}
    with MetricsWriter(folder, resume_step=1, tensorboard=False) as metrics:
        metrics.write(row)
    return folder


def run(folder: Path, **options: Any) -> Path:
    return Sample(folder, **options).write()


class Samples:
    """Writers of run folders, by kind."""

    HOSTILE = HOSTILE
    run = staticmethod(run)
    one = staticmethod(partial(run, iterations=1))
    two = staticmethod(partial(run, iterations=2))
    mixture = staticmethod(partial(run, iterations=40, tasks=("math", "shop", HOSTILE), ranks=2))
    bare = staticmethod(bare)
    hostile = staticmethod(hostile)


@pytest.fixture(scope="session")
def samples() -> Samples:
    return Samples()
