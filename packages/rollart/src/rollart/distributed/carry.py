"""Carries an exception out of a worker's process, whatever its constructor looks like.

Python's own pickling of an exception calls its class with `args`, which fails for every class that computes its
message from other parameters (tests/rollart/test_rollart_distributed_values.py).
"""

from __future__ import annotations

import traceback
from typing import Any


class Carried(Exception):
    """Raised in place of an exception by a worker's process: a line about it, its traceback, itself if possible, and
    the worker's name.
    """

    def __init__(self, line: str, trace: str, pickled: bytes, who: str) -> None:
        super().__init__(line, trace, pickled, who)
        self.line = line
        self.trace = trace
        self.pickled = pickled
        self.who = who

    def original(self) -> Exception | None:
        """The exception, or None when it could not be carried."""
        return restored(self.pickled) if self.pickled else None


def carried(error: BaseException, who: str = "") -> Carried:
    """Those that are no Exception are told, and not raised elsewhere: there they would say something else."""
    line = "".join(traceback.format_exception_only(error)).strip()
    itself = packed(error) if isinstance(error, Exception) else b""
    return Carried(line, "".join(traceback.format_exception(error)), itself, who)


def packed(error: Exception) -> bytes:
    """The exception without traceback and causes; nothing when what it holds cannot be pickled."""
    from ray import cloudpickle

    try:
        data = cloudpickle.dumps((type(error), error.args, error.__dict__))
        restored(data)
    except Exception:  # whatever a foreign class's pickling may raise
        return b""
    return data


def restored(data: bytes) -> Exception:
    """The exception packed by a process of this cluster."""
    from ray import cloudpickle

    cls, args, state = cloudpickle.loads(data)
    error: Any = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error
