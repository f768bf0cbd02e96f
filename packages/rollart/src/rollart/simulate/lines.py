"""Straight lines through what was measured: a start and a slope, neither ever negative
(tests/rollart/test_rollart_simulate_calibrate.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from msgspec import Struct


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
