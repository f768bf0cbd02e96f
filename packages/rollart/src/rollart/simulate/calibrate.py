"""A simulated world fitted to a real run: what its trace and metrics say about engines, environments and trainer.

Engines: a turn among n others takes `a + b n` seconds; `a` is launching its two steps, `b` the work on its tokens.
Where engines and trainer share cores, both are slower while both work: by as much as turns during train steps are.
Trainer: a train step takes `c + d tokens`. Weights: the three costs that are measured apart, as rates. Environments:
how many turns, how long, how often rewards of a group are all equal. What is fitted is written as a section
`simulate`, to be read and changed like any other (tests/rollart/test_rollart_simulate_calibrate.py).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from math import inf
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

import msgspec
from msgspec import Struct

from rollart.cli.train import config_of
from rollart.config import Config
from rollart.config.check import observation_tokens
from rollart.config.tasks import FrozenLakeConfig
from rollart.errors import ConfigError, RunMissing
from rollart.observe.metrics import Row, read_metrics
from rollart.observe.trace import ITERATIONS, Event, read_trace
from rollart.pipeline.modes import MODES
from rollart.simulate.catalog import GIB
from rollart.simulate.config import make_simulation
from rollart.simulate.trainer import Passes

# The first iteration starts engines' graphs and fills queues.
_SKIPPED = 1
_ENOUGH = 50
"""Turns without which a median says little."""


class Line(Struct, frozen=True):
    """`start + slope x`, both at least 0."""

    start: float
    slope: float


def fit_line(points: Sequence[tuple[float, float]]) -> Line:
    """The least squares of points, of those lines that fall nowhere and are nowhere negative."""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    middle, level = fmean(xs), fmean(ys)
    spread = sum((x - middle) ** 2 for x in xs)
    slope = sum((x - middle) * (y - level) for x, y in points) / spread if spread else 0.0
    if slope < 0:
        return Line(level, 0.0)
    if level - slope * middle < 0:
        return Line(0.0, sum(x * y for x, y in points) / sum(x * x for x in xs))
    return Line(level - slope * middle, slope)


def between_halves(points: Sequence[tuple[float, float]]) -> Line:
    """The least squares as far as they explain the points, and for the rest a line that is half constant: batches of
    one run hardly differ in size.
    """
    line, x, y = fit_line(points), fmean(x for x, _ in points), fmean(y for _, y in points)
    spread = sum((each - y) ** 2 for _, each in points)
    left = sum((each - line.start - line.slope * at) ** 2 for at, each in points)
    explained = max(0.0, 1.0 - left / spread) if spread else 0.0
    slope = explained * line.slope + (1.0 - explained) * 0.5 * y / x
    return Line(max(0.0, y - slope * x), slope)


class Spans(Struct, frozen=True):
    """The spans of a run by resource: name, start and end in seconds, arguments."""

    by_resource: dict[str, list[tuple[str, float, float, dict[str, Any]]]]

    @classmethod
    def read(cls, run: Path) -> Spans:
        events = read_trace(run / "trace.json")
        names = {event.pid: str(event.args["name"]) for event in events if event.name == "process_name"}
        found: dict[str, list[tuple[str, float, float, dict[str, Any]]]] = defaultdict(list)
        for event in events:
            if event.ph == "X":
                found[names[event.pid]].append(_span(event))
        return cls(dict(found))

    def of(self, prefix: str) -> list[list[tuple[str, float, float, dict[str, Any]]]]:
        """The spans of each resource of a kind."""
        return [spans for name, spans in self.by_resource.items() if name.split("-", 1)[0] == prefix]

    def named(self, resource: str, name: str) -> list[float]:
        """How long each span of a name took."""
        return [end - start for what, start, end, _ in self.by_resource.get(resource, []) if what == name]


def calibrate(run: Path) -> dict[str, Any]:
    """The run's configuration with a section `simulate` that is fitted to it. Raises RunMissing, ConfigError."""
    config = config_of(run, ())
    rows = read_metrics(run)[_SKIPPED:]
    if len(rows) < 3:
        raise RunMissing(f"{run} has {len(rows)} iterations after the first; a fit needs 3")
    if len(config.tasks) != 1:
        raise ConfigError("tasks", list(config.tasks), "a run of one task can be fitted")
    spans = Spans.read(run)
    tree: dict[str, Any] = msgspec.to_builtins(config)
    bare = make_simulation(tree | {"simulate": {"tasks": dict.fromkeys(config.tasks, "tiny-lake")}})
    profile = _profile(config, rows, spans)
    tokens = profile["observation"]["mean"] + profile["response"]["mean"]
    parameters = bare.shape.parameters
    crowding = _crowding(spans) if MODES[config.run.mode].overlap else 1.0
    turn = fit_line(list(_turns(spans, crowding)))
    train = between_halves([(float(row["trained_tokens"] or 0), float(row["time/train"] or 0)) for row in rows])
    rate = 2 * parameters * tokens / max(turn.slope, 1e-9)
    work = Passes(False, False, False).count * 2 * parameters * tokens / profile["response"]["mean"]
    size = parameters * bare.shape.bytes_each / GIB
    between = fmean(sum(float(row.get(f"time/{part}") or 0) for part in ("record", "other")) for row in rows)
    tree["generation"]["affinity"] = {"default": "fitted"}
    tree["simulate"] = {
        "batch": config.generation.max_num_seqs,
        "training": {
            "hardware": "fitted",
            "gpus": 1,
            "reference": False,
            "proximal": False,
            "recompute": False,
            "step_s": (train.start + between) / crowding,
            "crowding": crowding,
        },
        "generation": [{"hardware": "fitted", "gpus": config.generation.workers}],
        "hardware": {
            "fitted": {
                "tflops": rate / 1e12,
                "memory_gb": 16.0,
                "bandwidth_tbs": 1.0,
                "link_gbs": 5.0,
                "network_gbs": 1.0,
                "host_gbs": 5.0,
                "cost": 1.0,
                "node": 1,
                "overhead_s": turn.start / 2,
            }
        },
        "calibration": {
            "compute": 1.0,
            "memory": 1.0,
            "training": crowding * work / max(train.slope, 1e-9) / rate,
            "push_gibs": size / _mean(rows, "push_s"),
            "pull_gibs": size / _mean(rows, "pull_accumulated_s"),
            "load_gibs": size / _mean(rows, "pull_exposed_s"),
        },
        "tasks": dict.fromkeys(config.tasks, profile),
    }
    return tree


class _Turn(Struct, frozen=True):
    """How many ran at once, in tens, how long it took, and the part of it that the trainer worked beside it."""

    tens: int
    seconds: float
    crowded: float


def _turns(spans: Spans, crowding: float) -> Iterable[tuple[float, float]]:
    """For each number of turns at once, in tens: that number, and how long a turn took there in the median, were the
    trainer not there.
    """
    took: dict[int, list[float]] = defaultdict(list)
    for turn in _timed(spans):
        took[turn.tens].append(turn.seconds / (1 + (crowding - 1) * turn.crowded))
    for tens, each in took.items():
        if len(each) >= _ENOUGH:
            yield from [(10 * tens + 5.0, median(each))] * len(each)


def _crowding(spans: Spans) -> float:
    """How many times as long turns take while the trainer works: the median over equal numbers of turns at once."""
    beside: dict[int, list[float]] = defaultdict(list)
    alone: dict[int, list[float]] = defaultdict(list)
    for turn in _timed(spans):
        if turn.crowded in (0.0, 1.0):
            (beside if turn.crowded else alone)[turn.tens].append(turn.seconds)
    both = [tens for tens in beside if min(len(beside[tens]), len(alone[tens])) >= _ENOUGH]
    return max(1.0, median(median(beside[tens]) / median(alone[tens]) for tens in both)) if both else 1.0


def _timed(spans: Spans) -> Iterable[_Turn]:
    """The turns that no update or evaluation fell into: those waited."""
    first = spans.by_resource[ITERATIONS][_SKIPPED - 1][2]
    pauses = sorted(
        (start, end)
        for resource in ("controller", "commit")
        for name, start, end, _ in spans.by_resource.get(resource, [])
        if name in ("suspend", "update", "resume", "probe", "eval")
    )
    begins = [start for start, _ in pauses]
    trains = sorted((start, end) for name, start, end, _ in spans.by_resource.get("train", []) if name == "train")
    for engine in spans.of("gen"):
        starts, ends = sorted(span[1] for span in engine), sorted(span[2] for span in engine)
        for _, start, end, _ in engine:
            before = bisect_right(begins, end) - 1
            if start >= first and end > start and (before < 0 or pauses[before][1] <= start):
                at_once = bisect_right(starts, start) - bisect_left(ends, start)
                yield _Turn(at_once // 10, end - start, _covered(trains, start, end) / (end - start))


def _covered(spans: Sequence[tuple[float, float]], start: float, end: float) -> float:
    """Seconds between start and end that lie in one of these spans, which are sorted and apart."""
    covered = 0.0
    for index in range(bisect_right(spans, (start, inf)) - 1, len(spans)):
        if index >= 0:
            if spans[index][0] >= end:
                break
            covered += max(0.0, min(end, spans[index][1]) - max(start, spans[index][0]))
    return covered


def _profile(config: Config, rows: list[Row], spans: Spans) -> dict[str, Any]:
    (task,) = config.tasks.values()
    made = [float(args.get("tokens", 1)) for engine in spans.of("gen") for _, _, _, args in engine]
    steps = Counter(str(args["trajectory"]) for what, _, _, args in spans.by_resource["env"] if what == "step")
    delivered = _grown(rows, "delivered") + 1e-9
    filtered = _grown(rows, "filtered")
    batch = config.buffer.batch_groups * config.buffer.group_size
    turns = fmean(float(row["trained_tokens"] or 0) for row in rows) / batch / fmean(made)
    varied = pstdev(steps.values()) / fmean(steps.values())
    shown = observation_tokens(task) if isinstance(task, FrozenLakeConfig) else 64
    return {
        "turns": {"mean": turns, "std": varied * turns, "low": 1, "high": task.max_turns},
        "prompt": {"mean": shown},
        "observation": {"mean": shown},
        "response": {"mean": fmean(made)},
        "latest_only": isinstance(task, FrozenLakeConfig) or task.latest_only,
        "reset_s": _spread(spans.named("env", "reset")),
        "step_s": _spread(spans.named("env", "step")),
        "reward_s": _spread(spans.named("reward", "reward")),
        "success": fmean(float(row["success/mean"] or 0) for row in rows),
        "uniform": filtered / (filtered + delivered),
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"mean": fmean(values), "std": pstdev(values)} if values else {"mean": 0.0}


def _grown(rows: list[Row], column: str) -> float:
    return float(rows[-1][f"ledger/{column}"] or 0) - float(rows[0][f"ledger/{column}"] or 0)


def _mean(rows: list[Row], key: str) -> float:
    return max(1e-6, fmean(float(row[key] or 0) for row in rows))


def _span(event: Event) -> tuple[str, float, float, dict[str, Any]]:
    start = (event.ts or 0) / 1e6
    return event.name.split()[0], start, start + (event.dur or 0) / 1e6, dict(event.args)
