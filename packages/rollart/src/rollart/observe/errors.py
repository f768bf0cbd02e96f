"""Errors of observation. All of them are about one run folder or one misuse of a clock."""

from __future__ import annotations

from rollart.errors import RollArtError


class MissingMetric(RollArtError):
    """Raised when a row lacks a key that every iteration must have."""


class InvalidMetric(RollArtError, ValueError):
    """Raised when a metric is neither a number nor None, or its step does not follow the last row's."""


class CorruptFile(RollArtError):
    """Raised when a file of a run folder is damaged in a way that a kill in mid-write does not explain."""


class ClockMisuse(RollArtError):
    """Raised when the parts of an iteration overlap, or an iteration ends inside a part."""
