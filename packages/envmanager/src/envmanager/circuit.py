"""When to stop asking a backend that only fails, and when to try again. A pure state machine; time is an argument.

Invariants (test_envmanager_circuit.py::test_the_circuit_keeps_its_rules):
- closed: everything is admitted; `threshold` failures with no success between them open it;
- open: nothing is admitted until a wait is over that doubles with each opening; then one probe is, and nothing
  beside it;
- a success closes it, whoever brings it; after `limit` openings in a row it is broken, and stays so.
"""

import random
from typing import Literal

from envmanager.backoff import backoff

# A timer may fire this much before its time.
TICK_S = 1e-3
State = Literal["closed", "open", "probing", "broken"]


class Circuit:
    """`admit` before each start; then `succeeded` or `failed` for each end that says something about the backend."""

    def __init__(self, threshold: int = 16, limit: int = 10, first: float = 1.0, last: float = 60.0) -> None:
        if threshold < 1 or limit < 1:
            raise ValueError(f"threshold is {threshold} and limit is {limit}; both must be at least 1")
        self.threshold = threshold
        self.limit = limit
        self.state: State = "closed"
        self.openings = 0
        self._first = first
        self._last = last
        self._failures = 0
        self._until = 0.0
        self._jitter = random.Random(0)

    def admit(self, now: float) -> float | None:
        """0.0: start. Positive: ask again after so many seconds. None: ask again when something has ended."""
        if self.state == "open" and self._until - now < TICK_S:
            self.state = "probing"
            return 0.0
        if self.state == "open":
            return self._until - now
        return 0.0 if self.state == "closed" else None

    def succeeded(self) -> None:
        if self.state != "broken":
            self.state, self.openings, self._failures = "closed", 0, 0

    def failed(self, now: float) -> None:
        self._failures += 1
        if self.state == "probing" or (self.state == "closed" and self._failures >= self.threshold):
            self._open(now)

    def untold(self, now: float) -> None:
        """An admitted start ended without saying anything about the backend. If it was the probe, the next may
        try now.
        """
        if self.state == "probing":
            self.state, self._until = "open", now

    def _open(self, now: float) -> None:
        self.openings += 1
        self.state = "broken" if self.openings > self.limit else "open"
        self._until = now + backoff(self.openings - 1, self._jitter, self._first, self._last)
