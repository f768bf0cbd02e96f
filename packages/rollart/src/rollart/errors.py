"""The errors of rollart. Each says what happened, to which thing, and what to do about it."""

from __future__ import annotations

import errno
from pathlib import Path


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


class CannotWrite(RollArtError):
    """Raised when a file of the run cannot be written: a full disk, a quota, a limit, a folder that is read-only."""

    def __init__(self, place: Path | str, reason: str) -> None:
        super().__init__(
            f"{place} cannot be written: {reason}; see to room and permissions there, then rollart resume goes on"
        )


_UNWRITABLE = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM))


def unwritable(error: BaseException, folder: Path) -> CannotWrite | None:
    """What an error of the operating system says of `folder` or a file that it names; None for any other.

    A full disk lets many things fail: what came first counts, and not what failed while it was told or cleaned up.
    """
    told: BaseException | None = error
    while told is not None:
        if isinstance(told, OSError) and told.errno in _UNWRITABLE:
            return CannotWrite(told.filename or folder, told.strerror or str(told))
        told = told.__cause__ or told.__context__
    return None


class ParityError(RollArtError):
    """Raised when the engine's log-probabilities differ from the trainer's by more than the configured limit."""


class Diverged(RollArtError):
    """Raised when training has left the numbers: a gradient or a log-probability is not finite."""


class WeightsDiffer(RollArtError):
    """Raised when workers acknowledge a version with digests that differ from what the trainer published."""
