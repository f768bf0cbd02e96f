"""Trajectories as rows of a trace: what each waited for, from its reset to its reward, on a row of its own meanwhile.

Invariants (tests/rollart/test_rollart_trace.py):
- a row is one trajectory's at a time, and no two overlap (`test_a_trajectory_has_a_row_to_itself`);
- a trajectory is told from its beginning or not at all; when all rows are taken it is counted, and so is what an
  iteration's `limit` cuts (`test_phases_past_the_limit_are_counted`).
"""

from __future__ import annotations

from typing import NamedTuple

BEGINS, ENDS = "reset", "reward"
# A trajectory that ended without a reward keeps its row for so many iterations in which nothing was heard of it.
_SILENT = 2


class Phase(NamedTuple):
    """One thing that a trajectory did or waited for, on the clock."""

    name: str
    start: float
    end: float


class Told(NamedTuple):
    """What a trajectory did since the last iteration, and its row."""

    row: int
    trajectory: str
    phases: list[Phase]


class Stories:
    """The rows, and what is to be written to them at the end of the iteration."""

    def __init__(self, rows: int, limit: int) -> None:
        self._most = rows
        self._limit = limit
        self._free: list[float] = []  # from when on each row is free
        self._rows: dict[str, int] = {}  # of those that go on
        self._silent: dict[str, int] = {}
        self._told: dict[str, Told] = {}
        self._count = 0
        self._dropped = 0

    @property
    def rows(self) -> int:
        """How many there are so far."""
        return len(self._free)

    def add(self, trajectory: str, phase: Phase) -> None:
        """`trajectory` ended a phase."""
        if phase.name == BEGINS and trajectory not in self._rows:
            self._begin(trajectory, phase.start)
        row = self._rows.get(trajectory)
        if row is None or self._count >= self._limit:
            self._dropped += 1
            return
        self._count += 1
        self._silent[trajectory] = 0
        self._told.setdefault(trajectory, Told(row, trajectory, [])).phases.append(phase)
        self._free[row] = phase.end
        if phase.name == ENDS:
            self._leave(trajectory)

    def take(self) -> tuple[list[Told], int]:
        """What is to be told, and how many phases are not."""
        for trajectory in list(self._silent):
            self._silent[trajectory] += 1
            if self._silent[trajectory] > _SILENT:
                self._leave(trajectory)
        told, dropped = list(self._told.values()), self._dropped
        self._told, self._dropped, self._count = {}, 0, 0
        return told, dropped

    def _begin(self, trajectory: str, start: float) -> None:
        held = set(self._rows.values())
        row = next((n for n, free in enumerate(self._free) if free <= start and n not in held), len(self._free))
        if row < self._most:
            if row == len(self._free):
                self._free.append(start)
            self._rows[trajectory] = row

    def _leave(self, trajectory: str) -> None:
        del self._rows[trajectory], self._silent[trajectory]
