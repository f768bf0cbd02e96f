"""Following the event stream: bounded in the store, resumable by id, and never with a silent gap.

Tests: `test_resmgr_events.py`.
"""

from collections.abc import AsyncGenerator

from resmgr import wire
from resmgr.refusals import events_lost
from resmgr.store import Store
from resmgr.values import Event


async def watch(store: Store, since: int | None) -> AsyncGenerator[Event, None]:
    """Yields events after id `since`, or from now on; `EventsLost` where the next one is no longer kept."""
    last = await _position(store, since)
    async for entries in store.follow("events", f"0-{last}"):
        if not entries:
            await _position(store, last)
        for number, packed in entries:
            event = wire.event_of(int(number.partition("-")[2]), packed)
            if event.id != last + 1:
                raise events_lost(last, event.id)
            last = event.id
            yield event


async def _position(store: Store, since: int | None) -> int:
    """`since` if the stream still goes on from there, the last event's id if it is None."""
    _, oldest, newest = await store.call("position")
    last = int(newest.partition(b"-")[2])
    if since is None:
        return last
    kept = int(oldest.partition(b"-")[2]) if oldest else last + 1
    if not kept - 1 <= since <= last:
        raise events_lost(since, kept)
    return since
