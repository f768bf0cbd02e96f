"""Where the wall time of an iteration went, in parts that cannot overlap or leave a gap.

Invariant: the parts of an iteration sum to its wall time, to the nanosecond, and successive iterations
tile the run (tests/rollart/test_rollart_observe.py::test_parts_sum_to_wall_time_and_iterations_tile_the_run).
Mechanism: the clock is read once per change of part, the reading closes one part and opens the next, and
sums are of integers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from rollart.observe.errors import ClockMisuse

Clock = Callable[[], float]
OTHER = "other"
_NANO = 1_000_000_000


class StepTime(msgspec.Struct, frozen=True):
    """One iteration: its start and end on the clock, and nanoseconds by part."""

    start: float
    end: float
    parts_ns: dict[str, int]

    @property
    def wall_ns(self) -> int:
        return sum(self.parts_ns.values())

    @property
    def wall(self) -> float:
        return self.wall_ns / _NANO

    @property
    def parts(self) -> dict[str, float]:
        return {name: ns / _NANO for name, ns in self.parts_ns.items()}

    def metrics(self) -> dict[str, float]:
        return {f"time/{name}": seconds for name, seconds in self.parts.items()}


class StepClock:
    """Times the parts of iterations for one sequential owner (the controller).

    `part` may nest; time belongs to the innermost open part, so parts stay exclusive. Time outside every
    part is `other`.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open: list[str] = [OTHER]
        self._parts: dict[str, int] = {OTHER: 0}
        self._start = self._mark = _nanoseconds(clock())

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._charge()
        self._open.append(name)
        depth = len(self._open)
        try:
            yield
        finally:
            if len(self._open) != depth or self._open[-1] != name:
                raise ClockMisuse(f"part {name!r} ended while {self._open[-1]!r} was innermost")
            self._charge()
            self._open.pop()

    def lap(self) -> StepTime:
        """End the iteration; the next one begins at the same instant."""
        if len(self._open) > 1:
            raise ClockMisuse(f"the iteration ended inside part {self._open[-1]!r}")
        self._charge()
        step = StepTime(self._start / _NANO, self._mark / _NANO, self._parts)
        self._parts, self._start = {OTHER: 0}, self._mark
        return step

    def _charge(self) -> None:
        now = _nanoseconds(self._clock())
        part = self._open[-1]
        self._parts[part] = self._parts.get(part, 0) + now - self._mark
        self._mark = now


def _nanoseconds(seconds: float) -> int:
    return round(seconds * _NANO)
