"""Batches that travel: a face whose hand-out can get lost on the way lends a batch until it is known to have arrived.

A lent group counts as delivered and occupies its room. `confirm` frees the room; `reclaim` makes the groups alive
again, as old as they are by then, without the members whose payload is lost, and ends the rest that began with them.
So a consumer that is cancelled or dies between hand-out and arrival loses nothing, and no batch arrives with a hole.

Invariant: each lent group is confirmed or reclaimed once (tests/samplebuffer/test_samplebuffer_loans.py).
"""

from __future__ import annotations

from collections.abc import Collection

from samplebuffer.core import Core
from samplebuffer.group import OpenGroup
from samplebuffer.ticket import Ticket
from samplebuffer.values import Batch


def confirm(core: Core, batch: Batch) -> None:
    """The batch arrived."""
    for group in batch.groups:
        core.lent.pop(group.group_id, None)
    core.settle()


def reclaim(core: Core, batch: Batch, lost: Collection[int] = ()) -> None:
    """The batch did not arrive, and the payloads of the tickets `lost` never will."""
    cut = core.limits.oldest(core.version)
    dropped: list[Ticket] = []
    groups = [core.lent.pop(group.group_id) for group in batch.groups if group.group_id in core.lent]
    if not groups:
        return
    for group in reversed(groups):  # the first is put back last: in front
        _readmit(core, group)
        dropped += _drop(core, group, lost)
        if group.id in core.groups and any(group.stale(cut)):
            core.shelf.remove(group.id)
            dropped += core.age(group, cut)
    core.book.count_delivered(batch, by=-1)
    core.resting = False  # nobody trains on it: what it lost must be made, and no version follows
    core.settle(dropped, "failed")


def _readmit(core: Core, group: OpenGroup) -> None:
    core.group_ends["delivered"] -= 1
    core.book.ended["delivered"] -= len(group.done)
    group.queued = group.id in core.wanting
    core.adopt(group, group.done)


def drop(core: Core, lost: Collection[int]) -> None:
    """The payloads of these finished tickets are lost: their members failed, and are replaced."""
    dropped: list[Ticket] = []
    for group in list(core.groups.values()):
        dropped += _drop(core, group, lost)
    core.settle(dropped, "failed")


def _drop(core: Core, group: OpenGroup, lost: Collection[int]) -> list[Ticket]:
    gone = [sample for sample in group.done if sample.ticket_id in lost]
    if not gone:
        return []
    if group.whole is not None:
        core.shelf.remove(group.id)
        group.whole = None
    for sample in gone:
        core.book.end_buffered(sample, "failed")
    group.done = [sample for sample in group.done if sample.ticket_id not in lost]
    return core.replace(group, len(gone), "payload lost")
