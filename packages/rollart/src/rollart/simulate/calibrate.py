"""A simulated world fitted to a real run: what its metrics and trace say about engines, environments and trainer.

Where all roles compute on the cores of one machine, the CPU seconds of each are what it has to do, and the simulated
machine shares its cores among them. Elsewhere a turn among n others takes `a + b n` seconds and a train step
`c + d tokens`. `a` is launching a turn's two steps, `b` the work on its tokens. Weights: the three costs that are
measured apart, as rates. Environments: how many turns, how long, how often rewards of a group are all equal. What is
fitted is written as a section `simulate`, to be read and changed like any other
(tests/rollart/test_rollart_simulate_calibrate.py).
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from math import inf
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import msgspec
from msgspec import Struct

from rollart.cli.train import config_of
from rollart.config import Config
from rollart.config.check import observation_tokens
from rollart.config.tasks import FrozenLakeConfig
from rollart.errors import ConfigError, RunMissing
from rollart.observe.metrics import Row, read_metrics
from rollart.observe.trace import ITERATIONS, TRAJECTORIES, Event, read_trace
from rollart.simulate.catalog import GIB
from rollart.simulate.config import make_simulation
from rollart.simulate.trainer import Passes

# The first iteration starts engines' graphs and fills queues.
_SKIPPED = 1
_ENDS = [f"ledger/{column}" for column in ("delivered", "surplus", "stale", "filtered", "failed", "cancelled")]


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
                name = names[event.pid]
                found[f"{name}-{event.tid}" if name == TRAJECTORIES else name].append(_span(event))
        return cls(dict(found))

    def of(self, prefix: str) -> list[list[tuple[str, float, float, dict[str, Any]]]]:
        """The spans of each resource of a kind."""
        return [spans for name, spans in self.by_resource.items() if name.split("-", 1)[0] == prefix]

    def named(self, resource: str, name: str) -> list[float]:
        """How long each span of a name took."""
        return [end - start for what, start, end, _ in self.by_resource.get(resource, []) if what == name]


class Totals(Struct, frozen=True):
    """Means over the counted iterations."""

    turns: float
    """Generated, whatever became of them."""
    ended: float
    """Trajectories, trained on or not."""
    response: float
    """Tokens of a turn."""
    at_once: float
    """Turns on one engine, as a turn finds it."""


def calibrate(run: Path) -> dict[str, Any]:
    """The run's configuration with a section `simulate` that is fitted to it. Raises RunMissing, ConfigError."""
    config = config_of(run, ())
    rows = read_metrics(run)
    if len(rows) - _SKIPPED < 3:
        raise RunMissing(f"{run} has {len(rows) - _SKIPPED} iterations after the first; a fit needs 3")
    if len(config.tasks) != 1:
        raise ConfigError("tasks", list(config.tasks), "a run of one task can be fitted")
    spans = Spans.read(run)
    tree: dict[str, Any] = msgspec.to_builtins(config)
    bare = make_simulation(tree | {"simulate": {"tasks": dict.fromkeys(config.tasks, "tiny-lake")}})
    totals = _totals(rows, spans)
    rows = rows[_SKIPPED:]
    profile = _profile(config, rows, spans, totals)
    computing = _computing(rows, spans, totals) if rows[-1].get("engines/cpu_s") else _latencies(rows, spans)
    parameters = bare.shape.parameters
    tokens = profile["observation"]["mean"] + totals.response
    rate = 2 * parameters * tokens / max(computing.turn.slope, 1e-9)
    batch = config.buffer.batch_groups * config.buffer.group_size
    # The simulated batch has the mean length of all trajectories, the real one that of those that were trained on.
    scale = _mean(rows, "trained_tokens") / batch / (profile["turns"]["mean"] * totals.response)
    work = Passes(False, False, False).count * 2 * parameters * tokens / totals.response
    size = parameters * bare.shape.bytes_each / GIB
    tree["generation"]["affinity"] = {"default": "fitted"}
    tree["simulate"] = {
        "batch": config.generation.max_num_seqs,
        "host": {"cores": computing.cores, "turn_s": computing.driver_s} if computing.cores else None,
        "training": {
            "hardware": "fitted",
            "gpus": 1,
            "reference": False,
            "proximal": False,
            "recompute": False,
            "step_s": computing.train.start,
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
                "overhead_s": computing.turn.start / 2,
            }
        },
        "calibration": {
            "compute": 1.0,
            "memory": 1.0,
            "training": work / max(scale * computing.train.slope, 1e-9) / rate,
            "push_gibs": size / _mean(rows, "push_s"),
            "pull_gibs": size / _mean(rows, "pull_accumulated_s"),
            "load_gibs": size / computing.exposed_s,
        },
        "tasks": dict.fromkeys(config.tasks, profile),
    }
    return tree


class Computing(Struct, frozen=True):
    """What has to be done: a turn's seconds by the number at once, a train step's by its tokens, an update's, and
    what the driver takes of a turn where `cores` are shared.
    """

    turn: Line
    train: Line
    exposed_s: float
    cores: int = 0
    driver_s: float = 0.0


def _latencies(rows: Sequence[Row], spans: Spans) -> Computing:
    """Of engines and a trainer that do not slow each other down: as long as each took."""
    train = between_halves([(_number(row, "trained_tokens"), _number(row, "time/train")) for row in rows])
    between = fmean(_number(row, "time/record") + _number(row, "time/other") for row in rows)
    turn = fit_line([(turn.at_once, turn.seconds) for turn in _turns(spans)])
    return Computing(turn, Line(train.start + between, train.slope), _mean(rows, "pull_exposed_s"))


def _computing(rows: Sequence[Row], spans: Spans, totals: Totals) -> Computing:
    """Of roles that share the cores of this machine: the CPU seconds that each took. How long turns took says which
    part of an engine's goes to launching steps.
    """
    seen = fit_line([(turn.at_once, turn.seconds) for turn in _turns(spans)])
    each = _mean(rows, "engines/cpu_s") / totals.turns
    launching = seen.start / (seen.start + seen.slope * totals.at_once)
    between = fmean(_number(row, "time/record") + _number(row, "time/other") for row in rows)
    train = between_halves([(_number(row, "trained_tokens"), _number(row, "trainer/cpu_s")) for row in rows])
    return Computing(
        turn=Line(launching * each * totals.at_once, (1 - launching) * each),
        train=Line(train.start + between, train.slope),
        # Resuming is slow only for the driver, which sends all turns that waited.
        exposed_s=max(1e-6, fmean(_number(row, "time/suspend") + _number(row, "time/update") for row in rows)),
        cores=len(os.sched_getaffinity(0)),
        driver_s=max(0.0, _mean(rows, "driver/cpu_s") - between) / totals.turns,
    )


class _Turn(Struct, frozen=True):
    at_once: int
    """Turns that ran on its engine when it began."""
    seconds: float


def _turns(spans: Spans) -> list[_Turn]:
    """The turns that no update or evaluation fell into: those waited."""
    first = spans.by_resource[ITERATIONS][_SKIPPED - 1][2]
    pauses = sorted(
        (start, end)
        for resource in ("controller", "commit")
        for name, start, end, _ in spans.by_resource.get(resource, [])
        if name in ("suspend", "update", "resume", "probe", "eval")
    )
    begins = [start for start, _ in pauses]
    found: list[_Turn] = []
    for engine in spans.of("gen"):
        starts, ends = sorted(span[1] for span in engine), sorted(span[2] for span in engine)
        for _, start, end, _ in engine:
            before = bisect_right(begins, end) - 1
            if start >= first and end > start and (before < 0 or pauses[before][1] <= start):
                found.append(_Turn(bisect_right(starts, start) - bisect_left(ends, start), end - start))
    return found


def _totals(rows: Sequence[Row], spans: Spans) -> Totals:
    response = fmean(float(args.get("tokens", 1)) for engine in spans.of("gen") for _, _, _, args in engine)
    made = [_number(row, "tokens_per_s") * _wall(row) for row in rows[_SKIPPED:]]
    ended = sum(_number(rows[-1], name) - _number(rows[_SKIPPED - 1], name) for name in _ENDS)
    return Totals(
        turns=fmean(made) / response,
        ended=ended / len(made),
        response=response,
        at_once=fmean(turn.at_once for turn in _turns(spans)),
    )


def _profile(config: Config, rows: Sequence[Row], spans: Spans, totals: Totals) -> dict[str, Any]:
    (task,) = config.tasks.values()
    lengths = [length for lane in spans.of(TRAJECTORIES) for length in _lengths(lane)]
    delivered = _grown(rows, "delivered") + 1e-9
    filtered = _grown(rows, "filtered")
    turns = totals.turns / totals.ended
    varied = pstdev(lengths) / fmean(lengths)
    shown = observation_tokens(task) if isinstance(task, FrozenLakeConfig) else 64
    return {
        "turns": {"mean": turns, "std": varied * turns, "low": 1, "high": task.max_turns},
        "prompt": {"mean": shown},
        "observation": {"mean": shown},
        "response": {"mean": totals.response},
        "latest_only": isinstance(task, FrozenLakeConfig) or task.latest_only,
        "reset_s": _spread(spans.named("env", "reset")),
        "step_s": _spread(spans.named("env", "step")),
        "reward_s": _spread(spans.named("reward", "reward")),
        "success": fmean(float(row["success/mean"] or 0) for row in rows),
        "uniform": filtered / (filtered + delivered),
    }


def _lengths(lane: Sequence[tuple[str, float, float, dict[str, Any]]]) -> list[int]:
    """The turns of the trajectories that were told one after the other in a lane of the trace."""
    begins = [start for what, start, _, _ in lane if what == "trajectory"]
    turns = sorted(start for what, start, _, _ in lane if what == "generate")
    ends = [*begins[1:], inf]
    return [bisect_left(turns, end) - bisect_left(turns, begin) for begin, end in zip(begins, ends, strict=True)]


def _spread(values: list[float]) -> dict[str, float]:
    return {"mean": fmean(values), "std": pstdev(values)} if values else {"mean": 0.0}


def _grown(rows: Sequence[Row], column: str) -> float:
    return float(rows[-1][f"ledger/{column}"] or 0) - float(rows[0][f"ledger/{column}"] or 0)


def _wall(row: Row) -> float:
    return sum(_number(row, key) for key in row if key.startswith("time/"))


def _number(row: Row, key: str) -> float:
    return float(row.get(key) or 0)


def _mean(rows: Sequence[Row], key: str) -> float:
    return max(1e-6, fmean(_number(row, key) for row in rows))


def _span(event: Event) -> tuple[str, float, float, dict[str, Any]]:
    start = (event.ts or 0) / 1e6
    return event.name.split()[0], start, start + (event.dur or 0) / 1e6, dict(event.args)
