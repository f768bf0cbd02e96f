"""Events and moves: what watchers see, from where, and when a better place is offered."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from resmgr import Event, EventsLost, Pool, Request, ResourceManager

pytestmark = pytest.mark.real

FALLING = Request("gen", prefer=["H800"], fallback=["H20"], amount=2, gang=True)


@pytest.fixture
async def rm(place) -> ResourceManager:
    manager = await place.connect(ttl=0.15, settle=0.3, io_timeout=1)
    await manager.register(Pool("a", hardware="H800", total=2))
    await manager.register(Pool("b", hardware="H20", total=4))
    return manager


async def take(events: AsyncIterator[Event], count: int) -> list[Event]:
    return [await anext(events) for _ in range(count)]


async def test_a_watcher_sees_what_happens_in_order(rm):
    position = (await rm.status()).position
    first = await rm.bind(FALLING, timeout=0)
    second = await rm.bind(FALLING, timeout=0)
    await rm.reconfigure(second, 1)
    await rm.release(first)
    events = await take(rm.watch(position), 4)
    assert [e.kind for e in events] == ["bound", "fell_back", "reconfigured", "released"]
    assert [e.id for e in events] == list(range(position + 1, position + 5))
    assert (events[1].binding, events[1].hardware, events[1].token) == (second.id, "H20", second.token)


async def test_a_watcher_resumes_where_another_stopped_and_waits_for_more(rm, place):
    seen = await take(rm.watch(0), 1)
    other = await place.connect()
    rest = other.watch(seen[-1].id)
    assert (await anext(rest)).binding == "b"
    coming = asyncio.ensure_future(anext(rest))
    binding = await rm.bind(FALLING, timeout=0)
    assert (await coming).binding == binding.id


async def test_a_watcher_that_comes_too_late_is_told(rm, place):
    binding = await rm.bind(FALLING, timeout=0)
    await place.raw("XTRIM", "events", "MAXLEN", 1)
    with pytest.raises(EventsLost, match="read status"):
        await anext(rm.watch(0))
    assert (await anext(rm.watch(2))).binding == binding.id


async def test_a_watcher_of_a_store_that_lost_everything_is_told(rm, place):
    for _ in range(5):
        await rm.release(await rm.bind(FALLING, timeout=0))
    events = rm.watch()
    coming = asyncio.ensure_future(anext(events))
    while rm.stats().beats < 1:
        await rm.status()
    await place.wipe()
    with pytest.raises(EventsLost):
        await coming


async def test_watching_ends_with_the_manager_and_watchers_do_not_hold_up_calls(rm):
    watching = [asyncio.ensure_future(anext(rm.watch(), None)) for _ in range(20)]
    while rm.stats().beats < 3:
        await rm.status()
    await rm.close()
    assert await asyncio.gather(*watching) == [None] * 20


async def test_the_stream_is_bounded(rm, place):
    async with place.client.pipeline(transaction=False) as pipeline:
        for number in range(3, 11_000):
            pipeline.xadd(f"{{{place.namespace}}}:events", {"e": "x"}, id=f"0-{number}")
        await pipeline.execute()
    await rm.bind(FALLING, timeout=0)
    assert await place.raw("XLEN", "events") < 10_200


async def test_a_better_place_is_offered_once_it_has_been_free_for_a_while_and_taken_before_the_old_is_left(rm):
    position = (await rm.status()).position
    first, fallen = await rm.bind(FALLING, timeout=0), await rm.bind(FALLING, timeout=0)
    await rm.release(first)
    kinds = {}
    async for event in rm.watch(position):
        kinds[event.kind] = event
        if event.kind == "move_offered":
            break
    offer = kinds["move_offered"]
    assert (offer.binding, offer.hardware) == (fallen.id, "H800")
    assert offer.time - kinds["released"].time >= 0.25
    moved = await rm.move_back(fallen)
    assert (moved.hardware, moved.fell_back, moved.token > fallen.token) == ("H800", False, True)
    status = await rm.status()
    assert {p.name: p.free for p in status.pools} == {"a": 0, "b": 2}
    await rm.release(fallen)
    last = await take(rm.watch(offer.id), 2)
    assert [(e.kind, e.binding, e.previous) for e in last] == [
        ("moved_back", moved.id, fallen.id),
        ("released", fallen.id, ""),
    ]
    assert set(rm.bindings) == {moved.id}


async def test_room_that_comes_and_goes_is_not_offered(rm, place):
    position = (await rm.status()).position
    first, fallen = await rm.bind(FALLING, timeout=0), await rm.bind(FALLING, timeout=0)
    for _ in range(6):
        await rm.release(first)
        beats = rm.stats().beats
        while rm.stats().beats < beats + 2:
            await rm.check(fallen)
        first = await rm.bind(FALLING, timeout=0)
        beats = rm.stats().beats
        while rm.stats().beats < beats + 2:
            await rm.check(fallen)
        assert first.hardware == "H800"
    last = (await rm.status()).position
    kinds = [e.kind for e in await take(rm.watch(position), last - position)]
    assert "move_offered" not in kinds


async def test_an_offer_that_is_gone_gives_nothing(rm):
    first, fallen = await rm.bind(FALLING, timeout=0), await rm.bind(FALLING, timeout=0)
    assert await rm.move_back(fallen) is None
    await rm.release(first)
    waiting = asyncio.create_task(rm.bind(Request("x", prefer=["H800"], amount=2)))
    held = await waiting
    assert await rm.move_back(fallen) is None
    await rm.release(held)
    assert (await rm.move_back(fallen)).hardware == "H800"


async def test_a_move_that_came_to_nothing_can_be_made_again(rm):
    first, fallen = await rm.bind(FALLING, timeout=0), await rm.bind(FALLING, timeout=0)
    await rm.release(first)
    moved = await rm.move_back(fallen)
    assert await rm.move_back(fallen) is None  # it has one already
    position = (await rm.status()).position
    await rm.release(moved)  # its work did not start there
    async for event in rm.watch(position):
        if event.kind == "move_offered":
            break
    assert event.binding == fallen.id
    assert (await rm.move_back(fallen)).hardware == "H800"


async def test_a_move_is_of_the_present_amount(rm):
    first, fallen = await rm.bind(FALLING, timeout=0), await rm.bind(FALLING, timeout=0)
    await rm.reconfigure(fallen, 1)
    await rm.release(first)
    moved = await rm.move_back(rm.bindings[fallen.id])
    assert moved.amount == 1
