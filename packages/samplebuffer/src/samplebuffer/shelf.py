"""The complete groups, in the order in which they will be handed out: oldest start first, then oldest group.

Invariant: the shelf holds exactly the complete groups alive (tests/samplebuffer/test_samplebuffer_machine.py).
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush


class Shelf:
    """Orders group ids."""

    def __init__(self) -> None:
        self._ready: list[tuple[int, int]] = []  # heap of (oldest start, group id)
        self.changes = 0  # how often something was put or taken

    def __len__(self) -> int:
        return len(self._ready)

    def put(self, oldest: int, group_id: int) -> None:
        """Put up a complete group."""
        self.changes += 1
        heappush(self._ready, (oldest, group_id))

    def pop(self) -> int:
        """Take the first group off."""
        self.changes += 1
        return heappop(self._ready)[1]

    def discard_below(self, version: int) -> None:
        """Take off the groups whose oldest member started before this version."""
        while self._ready and self._ready[0][0] < version:
            self.pop()

    def remove(self, group_id: int) -> None:
        """Take one group off; costs by the groups there are."""
        self.changes += 1
        self._ready = [entry for entry in self._ready if entry[1] != group_id]
        heapify(self._ready)

    def clear(self) -> None:
        """Take off all groups."""
        self.changes += 1
        self._ready.clear()
