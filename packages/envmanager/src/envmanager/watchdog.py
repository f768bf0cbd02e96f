"""Names what is stuck: an episode that has been in one phase for too long, whatever its deadlines say.

Invariant: each long phase is reported once, and within `after` seconds of becoming so
(test_envmanager_watchdog.py::test_each_stuck_phase_is_named_once).
"""

import asyncio
import logging
from collections.abc import Callable, Iterable

import msgspec

from envmanager.manager import EnvManager

log = logging.getLogger(__name__)

# A timer may fire this much before its time.
TICK_S = 1e-3


class Stuck(msgspec.Struct, frozen=True):
    """One episode that does not move, and in what it does not."""

    id: str
    key: str
    phase: str
    seconds: float


class Watchdog:
    """Looks when the phase that is oldest now can have become too long, not more often."""

    def __init__(self, after: float, busy: Callable[[], Iterable[EnvManager]]) -> None:
        self.after = after
        self._busy = busy
        self._timer: asyncio.TimerHandle | None = None
        self._named: set[tuple[str, str]] = set()

    def start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self.after, self._look)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def stuck(self, now: float) -> list[Stuck]:
        """The longest first."""
        found = [
            Stuck(manager.episode.id, manager.episode.key, manager.phase, now - manager.since)
            for manager in self._busy()
            if manager.episode is not None and now - manager.since > self.after - TICK_S
        ]
        return sorted(found, key=lambda stuck: -stuck.seconds)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        stuck = self.stuck(now)
        for one in stuck:
            if (one.id, one.phase) not in self._named:
                log.warning("%r has been in %s for %.0f s (trajectory %s)", one.key, one.phase, one.seconds, one.id)
        self._named = {(one.id, one.phase) for one in stuck}
        moving = [manager.since for manager in self._busy() if now - manager.since <= self.after - TICK_S]
        self._timer = loop.call_at(min(moving, default=now) + self.after, self._look)
