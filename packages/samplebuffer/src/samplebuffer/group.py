"""A group alive.

Invariant: it is whole if and only if `group_size` members have finished, and then none is running
(tests/samplebuffer/test_samplebuffer_machine.py).
"""

from __future__ import annotations

from samplebuffer.tasks import Task
from samplebuffer.ticket import Ticket
from samplebuffer.values import Group, Sample


class OpenGroup:
    """Its running tickets, its finished samples, and, once complete, the group to deliver."""

    __slots__ = ("done", "id", "issued", "key", "lost", "queued", "running", "whole")

    def __init__(self, id: int, task: Task) -> None:
        self.id = id
        self.key = task.key
        self.lost = task.lost
        self.issued = 0
        self.queued = False  # in the queue of groups that want tickets
        self.running: dict[int, Ticket] = {}
        self.done: list[Sample] = []
        self.whole: Group | None = None

    @property
    def alive(self) -> int:
        """Members that have not ended."""
        return len(self.running) + len(self.done)

    def stale(self, cut: int) -> tuple[list[Ticket], list[Sample]]:
        """The members that started before version `cut`."""
        return (
            [ticket for ticket in self.running.values() if ticket.bound < cut],
            [sample for sample in self.done if sample.start_version < cut],
        )
