"""Hardware affinity that nobody has to configure: each task's class is the one where all together flow fastest.

Of every turn it is known how many tokens were prefilled and decoded, how many requests its worker had, and how long
it took. For each class a least-squares fit over all turns there gives the seconds of a prefilled token, of a decode
step, and what each further member adds to a step; so it is known what a turn of a task costs on a class where the
task never ran, and how many turns a second an assignment of tasks to classes would let through. The best one is
taken; it changes only when that promises a clear gain, so that noise does not move tasks to and fro
(tests/llmproxy/test_llmproxy_auto.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from random import Random
from typing import NamedTuple

from llmproxy.fleet import Fleet, Slot
from llmproxy.values import GenerateRequest, GenerateResult

from .affinity import AffinityRouter

_MEMORY = 0.999
"""Weight of the past at each turn: about the last thousand count, so that a policy that learns is followed."""
_PATIENCE = 3
"""Reviews in a row that must promise a gain: what a passing mix of tasks promises is gone by then."""
_TRY_ALL = 256
"""Assignments up to so many are compared exhaustively, which takes some milliseconds."""


class Costs(NamedTuple):
    """Seconds of a prefilled token, of a decode step, and what each further member adds to a step."""

    prefill: float
    step: float
    member: float


class Fit:
    """seconds = prefill * p + (step + member * n) * d, fitted over turns, the old ones forgotten."""

    def __init__(self) -> None:
        self.turns = 0
        self._products = [[1e-9 * (i == j) for j in range(3)] for i in range(3)]
        self._seconds = [0.0, 0.0, 0.0]

    def add(self, prefilled: float, decoded: float, members: float, seconds: float) -> None:
        if seconds <= 0.0:
            return
        self.turns += 1
        # Relative errors count, else the longest generations alone would decide.
        row = (prefilled / seconds, decoded / seconds, decoded * members / seconds)
        for i in range(3):
            self._seconds[i] = _MEMORY * self._seconds[i] + row[i]
            for j in range(3):
                self._products[i][j] = _MEMORY * self._products[i][j] + row[i] * row[j]

    def costs(self) -> Costs:
        return _solve(self._products, self._seconds)


class Means:
    """Tokens a turn of a task, and how many turns."""

    def __init__(self) -> None:
        self.turns = 0.0
        self.prefilled = 0.0
        self.decoded = 0.0

    def add(self, prefilled: float, decoded: float) -> None:
        self.turns += 1.0
        rate = max(1.0 / self.turns, 1.0 - _MEMORY)
        self.prefilled += rate * (prefilled - self.prefilled)
        self.decoded += rate * (decoded - self.decoded)

    def share(self, of: float) -> Share:
        return Share(self.turns / of, self.prefilled, self.decoded)


class AutoAffinityRouter(AffinityRouter):
    """Learns for each task its hardware class; else routes as AffinityRouter does.

    A new task's first trajectories are spread over all classes, `explore` turns each. Every `review` turns the
    assignment is reconsidered; another one must promise `margin` less time. What runs stays where it is.
    """

    def __init__(
        self,
        *,
        explore: int = 32,
        review: int = 512,
        margin: float = 0.1,
        fallback: Mapping[str, Sequence[str]] | None = None,
        saturation: int | None = None,
        slack: int = 200_000,
        remember: int = 65_536,
        random: Random | None = None,
    ) -> None:
        super().__init__(
            None, fallback=fallback, saturation=saturation, slack=slack, remember=remember, random=random
        )
        self._explore = explore
        self._review = review
        self._margin = margin
        self._fits: dict[str, Fit] = {}
        self._tasks: dict[str, Means] = {}
        self._tried: Counter[tuple[str, str]] = Counter()
        self._sizes: dict[str, int] = {}
        self._in_flight = 0.0
        self._turns = 0
        self._changes = 0
        self._promised = 0  # reviews in a row that promised a gain

    def served(self, request: GenerateRequest, slot: Slot, result: GenerateResult | None = None) -> None:
        super().served(request, slot, result)
        if result is None or result.timing.attempts > 1 or len(result.spans) > 1:
            return  # what took its time elsewhere says nothing of this class
        prefilled = len(request.prompt_ids) - result.timing.cached_tokens
        decoded = len(result.token_ids)
        self._fits.setdefault(slot.hardware, Fit()).add(prefilled, decoded, slot.running, result.timing.running)
        self._tasks.setdefault(request.task, Means()).add(prefilled, decoded)
        self._turns += 1
        if self._turns % self._review == 0:
            self._reconsider()

    @property
    def assignment(self) -> dict[str, str]:
        """The class of each task that has one."""
        return dict(self._affinity)

    def stats(self) -> dict[str, int]:
        classes = {f"class/{task}/{hardware}": 1 for task, hardware in self._affinity.items()}
        return super().stats() | {"changes": self._changes} | classes

    def _wanted(self, request: GenerateRequest, fleet: Fleet) -> str:
        self._sizes = {name: len(fleet.serving(name, 0)) for name in fleet.classes}
        if self._turns % 16 == 0:  # often enough for a mean, too seldom to cost
            running = sum(slot.running for slot in fleet if slot.serving)
            self._in_flight += 0.1 * (running - self._in_flight)
        home = fleet.get(self._homes[request.trajectory_id].worker) if request.trajectory_id in self._homes else None
        if home is not None:
            return home.hardware  # what runs stays where it is
        if request.task not in self._affinity or any(
            self._tried[request.task, name] < self._explore for name in self._sizes
        ):
            tried = {name: self._tried[request.task, name] / size for name, size in self._sizes.items()}
            name = min(tried, key=lambda name: (tried[name], name), default="")
            self._tried[request.task, name] += 1
            return name
        return self._affinity[request.task]

    def _reconsider(self) -> None:
        classes = [name for name in self._sizes if name in self._fits and self._fits[name].turns >= self._explore]
        if len(classes) < len(self._sizes):
            return
        total = sum(means.turns for means in self._tasks.values())
        mix = {task: means.share(total) for task, means in self._tasks.items()}
        model = Model(
            mix, {name: self._fits[name].costs() for name in classes}, self._sizes, max(1.0, self._in_flight)
        )
        now = {task: name for task, name in self._affinity.items() if name in classes}
        best = model.best()
        if len(now) == len(mix):
            better = best != now and model.flow(best) >= (1.0 + self._margin) * model.flow(now)
            self._promised = self._promised + 1 if better else 0
            if self._promised < _PATIENCE:
                return
        self._promised = 0
        self._changes += sum(now.get(task, name) != name for task, name in best.items())
        self._affinity.update(best)


class Share(NamedTuple):
    """A task's part of all turns, and what one asks for."""

    turns: float
    prefilled: float
    decoded: float


class Model:
    """How many turns a second flow when as many requests as now are in flight, if each task has its class.

    A turn takes `step * d` seconds however idle its worker, and `work = prefill * p + member * d` seconds for itself
    and for each other member. With X turns a second, a worker has n = X (step d + work) / (size - X work) members,
    summed over the tasks of the class. X is what makes all classes together hold what is in flight.
    """

    def __init__(
        self, mix: Mapping[str, Share], costs: Mapping[str, Costs], sizes: Mapping[str, int], in_flight: float
    ) -> None:
        self._tasks = list(mix)
        self._classes = list(costs)
        self._sizes = sizes
        self._in_flight = in_flight
        self._alone: dict[tuple[str, str], float] = {}
        self._work: dict[tuple[str, str], float] = {}
        for task, (turns, prefilled, decoded) in mix.items():
            for name, (prefill, step, member) in costs.items():
                self._alone[task, name] = turns * step * decoded
                self._work[task, name] = turns * (prefill * prefilled + member * decoded)

    def flow(self, assignment: Mapping[str, str]) -> float:
        """Turns a second."""
        loads = []
        for name in self._classes:
            pairs = [(task, name) for task, chosen in assignment.items() if chosen == name]
            work = sum(self._work[pair] for pair in pairs)
            loads.append((work, work + sum(self._alone[pair] for pair in pairs), self._sizes[name]))
        low = 0.0
        high = min((size / work for work, _, size in loads if work > 0.0), default=self._in_flight * 1e6)
        for _ in range(40):
            rate = (low + high) / 2
            held = sum(size * rate * once / max(1e-12, size - rate * work) for work, once, size in loads)
            low, high = (rate, high) if held < self._in_flight else (low, rate)
        return low

    def best(self) -> dict[str, str]:
        """All assignments are compared when they are few; else one task moves at a time."""
        if len(self._classes) ** len(self._tasks) <= _TRY_ALL:
            chosen = product(self._classes, repeat=len(self._tasks))
            return max((dict(zip(self._tasks, names, strict=True)) for names in chosen), key=self.flow)
        best = {task: min(self._classes, key=lambda name: self._work[task, name]) for task in self._tasks}
        while True:
            moves = [best | {task: name} for task in self._tasks for name in self._classes]
            better = max(moves, key=self.flow)
            if self.flow(better) <= self.flow(best):
                return best
            best = better


def _solve(products: list[list[float]], seconds: list[float]) -> Costs:
    """Least squares without negative costs: a coefficient that would be negative is left out."""
    used = [0, 1, 2]
    while True:
        found = _gauss([[products[i][j] for j in used] for i in used], [seconds[i] for i in used])
        negative = [i for i, value in zip(used, found, strict=True) if value < 0.0]
        if not negative:
            values = dict(zip(used, found, strict=True))
            return Costs(values.get(0, 0.0), values.get(1, 0.0), values.get(2, 0.0))
        used.remove(negative[-1])


def _gauss(matrix: list[list[float]], right: list[float]) -> list[float]:
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for at in range(size):
        pivot = max(range(at, size), key=lambda i: abs(rows[i][at]))
        rows[at], rows[pivot] = rows[pivot], rows[at]
        for i in range(size):
            if i != at and rows[at][at]:
                factor = rows[i][at] / rows[at][at]
                rows[i] = [a - factor * b for a, b in zip(rows[i], rows[at], strict=True)]
    return [row[-1] / row[i] if row[i] else 0.0 for i, row in enumerate(rows)]
