"""What a real run's rows and trace say: how many turns and how long, what its environments did, what each part took.

Rows count from the second on: the first iteration starts engines' graphs and fills queues.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from math import inf
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from rollart.config import Config
from rollart.config.check import observation_tokens
from rollart.config.tasks import FrozenLakeConfig
from rollart.errors import RunMissing
from rollart.observe.metrics import LEDGER_ENDS, Row, read_metrics, wall_seconds
from rollart.observe.trace import ITERATIONS, TRAJECTORIES, Event, read_trace

_SKIPPED = 1
_ENOUGH = 3
_NEEDED = ("trained_tokens", "tokens_per_s", "time/train")
_PAUSES = ("suspend", "update", "resume", "probe", "eval")

Span = tuple[str, float, float, dict[str, Any]]
"""Name, start and end in seconds, arguments."""
Latency = tuple[float, float]
"""How many turns ran on an engine when one began there, and its seconds."""


class Observed:
    """A run of one task. Raises RunMissing when it is too short, or was not recorded well enough, to say anything."""

    def __init__(self, run: Path, config: Config) -> None:
        rows = read_metrics(run)
        self.rows = rows[_SKIPPED:]
        if len(self.rows) < _ENOUGH:
            raise RunMissing(f"{run} has {len(self.rows)} iterations after the first; a fit needs {_ENOUGH}")
        self._before = rows[_SKIPPED - 1]
        self._config = config
        for column in _NEEDED:
            if not any(number(row, column) for row in self.rows):
                raise RunMissing(f"{run} has iterations that say nothing of {column}; they cannot be fitted to")
        self._spans = _spans(run)
        if not self._spans.get(ITERATIONS) or not self.latencies:
            raise RunMissing(f"{run}/trace.json tells of no iterations or turns of the run, which a fit needs")

    def mean(self, *keys: str) -> float:
        """Of the sum of these columns, and never 0."""
        return max(1e-6, fmean(sum(number(row, key) for key in keys) for row in self.rows))

    def points(self, x: str, y: str) -> list[tuple[float, float]]:
        """Two columns of each row."""
        return [(number(row, x), number(row, y)) for row in self.rows]

    @cached_property
    def response(self) -> float:
        """Tokens that a turn generates."""
        return fmean(float(args.get("tokens", 1)) for engine in self._of("gen") for _, _, _, args in engine)

    @cached_property
    def turns(self) -> float:
        """Turns of an iteration, whatever became of their trajectories."""
        return fmean(number(row, "tokens_per_s") * wall_seconds(row) for row in self.rows) / self.response

    @cached_property
    def length(self) -> float:
        """Turns of a trajectory."""
        return self.turns * len(self.rows) / max(1.0, sum(map(self._grown, LEDGER_ENDS)))

    @cached_property
    def latencies(self) -> list[Latency]:
        """Of the counted turns, without those that an update or an evaluation fell into, which waited."""
        first = self._spans[ITERATIONS][_SKIPPED - 1][2]
        pauses = sorted(
            (start, end)
            for resource in ("controller", "commit")
            for name, start, end, _ in self._spans.get(resource, [])
            if name in _PAUSES
        )
        begins = [start for start, _ in pauses]

        def waited(start: float, end: float) -> bool:
            before = bisect_right(begins, end) - 1
            return before >= 0 and pauses[before][1] > start

        return [latency for start, end, latency in self._turns() if start >= first and not waited(start, end)]

    @cached_property
    def alone(self) -> list[Latency]:
        """Of the turns that were played before the first iteration, while nobody trained."""
        first = self._spans[ITERATIONS][0][1]
        return [latency for _, end, latency in self._turns() if end <= first]

    def _turns(self) -> Iterator[tuple[float, float, Latency]]:
        """When each turn began and ended."""
        for engine in self._of("gen"):
            starts, ends = sorted(span[1] for span in engine), sorted(span[2] for span in engine)
            for _, start, end, _ in engine:
                if end > start:
                    yield start, end, (bisect_right(starts, start) - bisect_left(ends, start), end - start)

    def profile(self) -> dict[str, Any]:
        """The task as a profile of data/tasks.yaml."""
        (task,) = self._config.tasks.values()
        lengths = [length for lane in self._of(TRAJECTORIES) for length in _lengths(lane)]
        varied = pstdev(lengths) / fmean(lengths)
        shown = observation_tokens(task) if isinstance(task, FrozenLakeConfig) else 64
        return {
            "turns": {"mean": self.length, "std": varied * self.length, "low": 1, "high": task.max_turns},
            "prompt": {"mean": shown},
            "observation": {"mean": shown},
            "response": {"mean": self.response},
            "latest_only": isinstance(task, FrozenLakeConfig) or task.latest_only,
            "reset_s": self._spread("env", "reset"),
            "step_s": self._spread("env", "step"),
            "reward_s": self._spread("reward", "reward"),
            "success": self._success,
            "uniform": self._alike(),
        }

    @cached_property
    def _success(self) -> float:
        return fmean(number(row, "success/mean") for row in self.rows)

    def _alike(self) -> float:
        """Of groups, those whose rewards are all equal, beyond those that are so by chance."""
        delivered, filtered = self._grown("delivered"), self._grown("filtered")
        size = self._config.buffer.group_size
        chance = self._success**size + (1 - self._success) ** size
        equal = filtered / max(1.0, filtered + delivered)
        return max(0.0, (equal - chance) / (1 - chance)) if chance < 1 else 0.0

    def _of(self, kind: str) -> list[list[Span]]:
        """The spans of each resource of a kind."""
        return [spans for name, spans in self._spans.items() if name.split("-", 1)[0] == kind]

    def _spread(self, resource: str, name: str) -> dict[str, float]:
        took = [end - start for what, start, end, _ in self._spans.get(resource, []) if what == name]
        return {"mean": fmean(took), "std": pstdev(took)} if took else {"mean": 0.0}

    def _grown(self, column: str) -> float:
        """Of the ledger, over all rows."""
        return number(self.rows[-1], f"ledger/{column}") - number(self._before, f"ledger/{column}")


def number(row: Row, key: str) -> float:
    """A column, 0 where it was not measured."""
    return float(row.get(key) or 0)


def _spans(run: Path) -> dict[str, list[Span]]:
    """By resource; each lane of trajectories is one."""
    events = read_trace(run / "trace.json")
    names = {event.pid: str(event.args["name"]) for event in events if event.name == "process_name"}
    found: dict[str, list[Span]] = defaultdict(list)
    for event in events:
        if event.ph == "X":
            name = names.get(event.pid, "")
            found[f"{name}-{event.tid}" if name == TRAJECTORIES else name].append(_span(event))
    return dict(found)


def _lengths(lane: Sequence[Span]) -> list[int]:
    """The turns of the trajectories that were told one after the other in a lane."""
    begins = [start for what, start, _, _ in lane if what == "trajectory"]
    turns = sorted(start for what, start, _, _ in lane if what == "generate")
    ends = [*begins[1:], inf]
    return [bisect_left(turns, end) - bisect_left(turns, begin) for begin, end in zip(begins, ends, strict=True)]


def _span(event: Event) -> Span:
    start = (event.ts or 0) / 1e6
    return event.name.split()[0], start, start + (event.dur or 0) / 1e6, dict(event.args)
