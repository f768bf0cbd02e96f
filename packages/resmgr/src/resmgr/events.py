"""Following the event stream: bounded in the store, resumable by id, and never with a silent gap.

Tests: `test_resmgr_events.py`.
"""

from collections.abc import AsyncIterator

from resmgr import wire
from resmgr.refusals import events_lost
from resmgr.store import Store
from resmgr.values import Event


async def watch(store: Store, since: int | None) -> AsyncIterator[Event]:
    """Yields events after id `since`, or from now on; `EventsLost` where the next one is no longer kept."""
    last = await _position(store, since)
    async for entries in store.follow("events", f"{last}-0"):
        if not entries:
            await _position(store, last)
        for number, packed in entries:
            event = wire.event_of(int(number.partition("-")[0]), packed)
            if event.id != last + 1:
                raise events_lost(last, event.id)
            last = event.id
            yield event


async def _position(store: Store, since: int | None) -> int:
    """`since` if the stream still goes on from there, the last event's id if it is None."""
    _, first, last = await store.call("position")
    if since is None:
        return int(last)
    kept = int(first.partition(b"-")[0]) if first else int(last) + 1
    if not kept - 1 <= since <= int(last):
        raise events_lost(since, kept)
    return since
