"""Where keys come from: recycled ones first, then the caller's iterator.

Invariant: a key leaves `take` once for each time it was drawn or put back, and every key drawn is either out or
waiting here (tests/samplebuffer/test_samplebuffer_machine.py).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from samplebuffer.errors import InvalidConfig

log = logging.getLogger("samplebuffer")


class Task(msgspec.Struct, frozen=True):
    """A key to open a group for, and how many members earlier groups of the key have lost to failures."""

    key: Any
    lost: int = 0


class Tasks:
    """The keys still to be opened. `drawn` counts what the iterator gave."""

    def __init__(self, keys: Iterable[Any], waiting: Iterable[Task] = (), drawn: int = 0) -> None:
        if not isinstance(keys, Iterable):
            raise InvalidConfig("tasks", keys, "give an iterable of keys, which is drawn from without waiting")
        self._keys: Iterator[Any] = iter(keys)
        self.waiting = deque(waiting)
        self.drawn = drawn
        self.ended = False
        self.error: Exception | None = None

    def take(self) -> Task | None:
        """The next task; None when there is none left."""
        return self.waiting.popleft() if self.waiting or self._draw() else None

    def put_back(self, task: Task) -> None:
        """Have this key opened before all others."""
        self.waiting.appendleft(task)

    @property
    def over(self) -> bool:
        """Whether no task is left. Looks one key ahead."""
        return not self.waiting and not self._draw()

    def _draw(self) -> bool:
        """Draw one key. An iterator that raises has ended: its error must reach the consumer, not a producer."""
        if self.ended:
            return False
        try:
            key = next(self._keys)
        except StopIteration:
            self.ended = True
            return False
        except Exception as error:
            log.exception("the task iterator raised; no more keys are drawn")
            self.ended, self.error = True, error
            return False
        self.drawn += 1
        self.waiting.append(Task(key))
        return True
