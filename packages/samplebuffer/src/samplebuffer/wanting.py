"""The groups that want tickets, the oldest first.

Invariants: every group that wants a ticket is in here; a group is in here at most once, and leaves when it is found
to want none, so that asking costs the same however many groups are alive
(tests/samplebuffer/test_samplebuffer_machine.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush

from samplebuffer.group import OpenGroup


class Wanting:
    """Orders groups by id. `launch` is how many members of a group may be alive."""

    def __init__(self, launch: int) -> None:
        self._launch = launch
        self._ids: list[int] = []  # heap

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._ids

    def put(self, group: OpenGroup) -> None:
        """This group may want tickets."""
        if not group.queued:
            group.queued = True
            heappush(self._ids, group.id)

    def first(self, groups: Mapping[int, OpenGroup]) -> OpenGroup | None:
        """The oldest that does, of those alive."""
        while self._ids:
            group = groups.get(self._ids[0])
            if group is not None and group.whole is None and group.alive < self._launch:
                return group
            heappop(self._ids)
            if group is not None:
                group.queued = False
        return None
