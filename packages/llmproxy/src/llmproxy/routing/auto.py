"""Hardware affinity that nobody has to configure: each task's class is the one where it costs least, as measured.

Of every turn it is known how many tokens were prefilled and decoded, how many requests its worker had, and how long it
took. For each class a least-squares fit over all turns there gives the seconds of a prefilled token, of a decode step, and
what each further member adds to a step; what a turn of a task costs on a class follows from its mean token counts, also
where the task never ran. The assignment is the one whose busiest class is least busy; it changes only when that promises a
clear gain, so that noise does not move tasks to and fro (tests/llmproxy/test_llmproxy_auto.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from math import inf
from random import Random

from llmproxy.fleet import Fleet, Slot
from llmproxy.values import GenerateRequest, GenerateResult

from .affinity import AffinityRouter

_MEMORY = 0.999
"""Weight of the past at each turn: about the last thousand count, so that a policy that learns is followed."""
_TRY_ALL = 4_096
"""Assignments up to so many are compared exhaustively; beyond, tasks are moved one at a time."""


class Fit:
    """seconds = prefill * p + step * d + member * d * n, fitted over turns, the old ones forgotten."""

    def __init__(self) -> None:
        self.turns = 0
        self._products = [[1e-9 * (i == j) for j in range(3)] for i in range(3)]
        self._seconds = [0.0, 0.0, 0.0]

    def add(self, prefilled: float, decoded: float, members: float, seconds: float) -> None:
        self.turns += 1
        row = (prefilled, decoded, decoded * members)
        for i in range(3):
            self._seconds[i] = _MEMORY * self._seconds[i] + row[i] * seconds
            for j in range(3):
                self._products[i][j] = _MEMORY * self._products[i][j] + row[i] * row[j]

    def cost(self, prefilled: float, decoded: float, members: float) -> float:
        """Seconds of a worker with so many members that such a turn takes for itself."""
        prefill, step, member = _solve(self._products, self._seconds)
        return prefill * prefilled + decoded * (step / members + member)


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


class AutoAffinityRouter(AffinityRouter):
    """Learns for each task its hardware class; else routes as AffinityRouter does.

    A new task's first trajectories are spread over all classes, `explore` turns each. Every `review` turns the assignment
    is reconsidered; another one must promise `margin` less time. What runs stays where it is.
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
        self._members: dict[str, float] = {}
        self._turns = 0
        self._changes = 0

    def served(self, request: GenerateRequest, slot: Slot, result: GenerateResult | None = None) -> None:
        super().served(request, slot, result)
        if result is None or result.timing.attempts > 1 or len(result.spans) > 1:
            return  # what took its time elsewhere says nothing of this class
        prefilled = len(request.prompt_ids) - result.timing.cached_tokens
        decoded = len(result.token_ids)
        members = self._members.get(slot.hardware, 1.0)
        self._members[slot.hardware] = members + (1.0 - _MEMORY) * 10 * (slot.running - members)
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

    def _wanted(self, request: GenerateRequest, own: Slot | None, fleet: Fleet) -> str:
        self._sizes = {name: len(fleet.serving(name, 0)) for name in fleet.classes}
        if own is not None:
            return own.hardware
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
        tasks = list(self._tasks)
        members = max(1.0, sum(self._members[name] for name in classes) / len(classes))
        work = {
            (task, name): means.turns
            * self._fits[name].cost(means.prefilled, means.decoded, members)
            / self._sizes[name]
            for task, means in self._tasks.items()
            for name in classes
        }
        best = _assign(tasks, classes, work)
        now = {task: self._affinity[task] for task in tasks if self._affinity.get(task) in classes}
        if len(now) == len(tasks) and _busiest(best, work) > (1.0 - self._margin) * _busiest(now, work):
            return
        self._changes += sum(now.get(task, best[task]) != best[task] for task in tasks)
        self._affinity.update(best)


def _busiest(assignment: Mapping[str, str], work: Mapping[tuple[str, str], float]) -> float:
    busy: Counter[str] = Counter()
    for task, name in assignment.items():
        busy[name] += work[task, name]  # type: ignore[assignment]
    return max(busy.values(), default=inf)


def _assign(tasks: list[str], classes: list[str], work: Mapping[tuple[str, str], float]) -> dict[str, str]:
    """The assignment whose busiest class is least busy."""
    if len(classes) ** len(tasks) <= _TRY_ALL:
        options = (dict(zip(tasks, names, strict=True)) for names in product(classes, repeat=len(tasks)))
        return min(options, key=lambda option: _busiest(option, work))
    best = {task: min(classes, key=lambda name: work[task, name]) for task in tasks}
    while True:
        moves = [best | {task: name} for task in tasks for name in classes]
        better = min(moves, key=lambda option: _busiest(option, work))
        if _busiest(better, work) >= _busiest(best, work):
            return best
        best = better


def _solve(products: list[list[float]], seconds: list[float]) -> tuple[float, float, float]:
    """Least squares without negative costs: a coefficient that would be negative is left out."""
    used = [0, 1, 2]
    while True:
        found = _gauss([[products[i][j] for j in used] for i in used], [seconds[i] for i in used])
        negative = [i for i, value in zip(used, found, strict=True) if value < 0.0]
        if not negative:
            values = dict(zip(used, found, strict=True))
            return values.get(0, 0.0), values.get(1, 0.0), values.get(2, 0.0)
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
