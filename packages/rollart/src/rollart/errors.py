"""The errors of rollart. Each says what happened, to which thing, and what to do about it."""

from __future__ import annotations


class RollArtError(Exception):
    """Base of every error that rollart raises on purpose."""


class ConfigError(RollArtError, ValueError):
    """Raised when a configuration key is unknown, ill-typed, out of range, or impossible together with another."""

    def __init__(self, key: str, value: object, reason: str) -> None:
        super().__init__(f"{key} = {value!r}: {reason}")
        self.key = key
        self.value = value
        self.reason = reason


class RunExists(RollArtError):
    """Raised when a run folder exists and neither --overwrite, --resume nor --continue was given."""


class RunMissing(RollArtError):
    """Raised when a run folder, or its checkpoint, is asked for and is not there."""


class CheckpointError(RollArtError):
    """Raised when a checkpoint is incomplete or was written by an incompatible version."""


class ParityError(RollArtError):
    """Raised when the engine's log-probabilities differ from the trainer's by more than the configured limit."""


class WeightsDiffer(RollArtError):
    """Raised when workers acknowledge a version with digests that differ from what the trainer published."""
