"""What both faces promise, in one suite: the buffer in process, and in a Ray actor."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from samplebuffer import (
    AlreadyStamped,
    Closed,
    Exhausted,
    InvalidConfig,
    InvalidReward,
    InvalidState,
    MsgpackCodec,
    NotStamped,
    SampleBuffer,
    StampOutOfRange,
    Starved,
    Unsavable,
    VersionWentBack,
)

Make = Callable[..., Any]
KEYS = range(1000)


async def done(answer: Any) -> Any:
    """The answer of either face."""
    return await answer if inspect.isawaitable(answer) else answer


async def ledger(buf: Any) -> Any:
    return (await done(buf.stats())).ledger


@pytest.fixture(params=["process", pytest.param("ray", marks=[pytest.mark.real, pytest.mark.timeout(400)])])
async def make(request: pytest.FixtureRequest) -> AsyncIterator[Make]:
    if request.param == "process":
        yield lambda keys=KEYS, **sizes: SampleBuffer(keys, **sizes)
        return
    request.getfixturevalue("ray_cluster")
    from samplebuffer.ray import RayBuffer

    made: list[RayBuffer] = []

    def start(keys: Any = KEYS, **sizes: Any) -> RayBuffer:
        made.append(RayBuffer.create(keys, **sizes))
        return made[-1]

    yield start
    for buf in made:
        await buf.leave()


async def run(ticket: Any, payload: Any = None, reward: float = 1.0) -> Any:
    await done(ticket.stamp(ticket.issued_version))
    return await done(ticket.finish(payload, reward))


async def take(buf: Any, n: int) -> list[Any]:
    return [await buf.next_ticket() for _ in range(n)]


async def test_the_whole_life_of_a_batch(make: Make) -> None:
    buf = make(batch_groups=2, group_size=2, alpha=0.5)
    tickets = await take(buf, 6)
    assert [(t.key, t.group_id, t.member) for t in tickets] == [(k, k, m) for k in range(3) for m in range(2)]
    waiter = asyncio.create_task(buf.next_ticket())
    for ticket in tickets:
        assert await run(ticket, {"id": ticket.id}, ticket.id / 2) == "accepted"
    batch = await buf.get_batch(trainer_version=1)
    assert [group.key for group in batch.groups] == [0, 1] and (batch.max_staleness, batch.max_lag) == (0, 1)
    assert [(s.payload, s.reward, s.start_version) for s in batch.samples] == [
        ({"id": i}, i / 2, 0) for i in range(4)
    ]
    assert batch.ledger.balanced and batch.ledger.delivered == 4
    assert (await waiter).key == 3
    assert (await ledger(buf)).running == 1


async def test_surplus_and_stale_are_told_and_their_late_answers_say_so(make: Make) -> None:
    buf = make(batch_groups=1, group_size=2, alpha=0, spare_members=1)
    tickets = await take(buf, 3)
    told: asyncio.Queue[str] = asyncio.Queue()
    tickets[2].on_cancel(told.put_nowait)
    for ticket in tickets[:2]:
        await run(ticket)
    assert await told.get() == "surplus"
    assert await done(tickets[2].finish("late", 1.0)) == "surplus"
    assert await done(tickets[0].finish("again", 1.0)) == "ended"
    await buf.get_batch()
    (running,) = await take(buf, 1)
    running.on_cancel(told.put_nowait)
    assert [t.id for t in await done(buf.advance(1))] == [running.id]
    assert await told.get() == "stale"
    assert await done(running.finish("late", 1.0)) == "stale" and not await done(running.cancel())
    after = await ledger(buf)
    assert (after.surplus, after.stale, after.balanced) == (1, 1, True)
    assert (await take(buf, 1))[0].key == running.key


async def test_failures_are_replaced_then_given_up(make: Make) -> None:
    buf = make(batch_groups=1, group_size=1, alpha=0, max_replacements=1)
    for attempt in range(2):
        (ticket,) = await take(buf, 1)
        assert (ticket.key, ticket.member) == (0, attempt)
        assert await done(ticket.fail(ValueError("broken")) if attempt else ticket.cancel())
    assert (await take(buf, 1))[0].key == 1
    (given_up,) = (await done(buf.stats())).given_up
    assert (given_up.key, given_up.lost, given_up.error) == (0, 2, "ValueError: broken")


async def test_filtering_and_the_end_of_the_tasks(make: Make) -> None:
    buf = make(keys=["a", "b", "c"], batch_groups=2, group_size=1, alpha=1, keep=lambda g: g.samples[0].reward > 0)
    for ticket in await take(buf, 3):
        assert await run(ticket, reward=float(ticket.key == "b")) == "accepted"
    with pytest.raises(Starved, match="after 3 keys; 1 groups are left, a batch needs 2") as starved:
        await buf.get_batch()
    assert starved.value.ledger.filtered == 2
    assert [group.key for group in (await buf.get_batch(partial=True)).groups] == ["b"]
    with pytest.raises(Exhausted):
        await buf.next_ticket()
    with pytest.raises(Starved):
        await buf.get_batch(partial=True)


async def test_sync_cancels_spares_and_rests(make: Make) -> None:
    buf = make(batch_groups=1, group_size=1, alpha=0, spare_groups=1)
    first, spare = await take(buf, 2)
    told: asyncio.Queue[str] = asyncio.Queue()
    spare.on_cancel(told.put_nowait)
    await run(first)
    assert (await buf.get_batch(cancel_spares=True)).ledger.surplus == 1
    assert await told.get() == "surplus"
    waiter = asyncio.create_task(buf.next_ticket())
    assert await done(buf.advance(1)) == []
    assert (await waiter).key == spare.key


@pytest.mark.parametrize("advance", [True, False])
async def test_after_a_batch_with_rest_nothing_begins_until_advance_or_wake(make: Make, advance: bool) -> None:
    buf = make(batch_groups=1, group_size=1, alpha=1)
    first, other = await take(buf, 2)
    await run(first)
    await buf.get_batch(rest=True)
    waiter = asyncio.create_task(buf.next_ticket())
    await done(other.cancel())
    await asyncio.sleep(0)
    assert not waiter.done()
    await done(buf.advance(1) if advance else buf.wake())
    ticket = await waiter
    assert ticket.issued_version == advance


async def test_close_wakes_everyone_and_ends_what_runs(make: Make) -> None:
    buf = make(batch_groups=1, group_size=1, alpha=0)
    (ticket,) = await take(buf, 1)
    told: asyncio.Queue[str] = asyncio.Queue()
    ticket.on_cancel(told.put_nowait)
    waiters = [asyncio.create_task(buf.next_ticket()), asyncio.create_task(buf.get_batch())]
    await asyncio.sleep(0)
    await done(buf.close())
    assert [type(e) for e in await asyncio.gather(*waiters, return_exceptions=True)] == [Closed, Closed]
    assert await told.get() == "closed" and await done(ticket.finish("late", 1.0)) == "ended"


async def test_timeouts_and_cancelled_waiters_lose_nothing(make: Make) -> None:
    buf = make(batch_groups=1, group_size=1, alpha=0)
    (ticket,) = await take(buf, 1)
    with pytest.raises(TimeoutError):
        await buf.get_batch(timeout=0.01)
    waiters = [asyncio.create_task(buf.get_batch()), asyncio.create_task(buf.next_ticket())]
    await asyncio.sleep(0)
    for waiter in waiters:
        waiter.cancel()
    assert all(isinstance(e, asyncio.CancelledError) for e in await asyncio.gather(*waiters, return_exceptions=True))
    await run(ticket, "x")
    assert (await buf.get_batch()).samples[0].payload == "x"
    assert (await take(buf, 1))[0].key == 1


async def test_misuse_is_a_typed_error_and_changes_nothing(make: Make) -> None:
    with pytest.raises(InvalidConfig, match="alpha=-1"):
        make(batch_groups=1, group_size=1, alpha=-1)
    buf = make(batch_groups=1, group_size=1, version=3)
    (ticket,) = await take(buf, 1)
    with pytest.raises(NotStamped, match=r"ticket 0 \(running\)"):
        await done(ticket.finish("x", 1.0))
    for version in (2, 4):
        with pytest.raises(StampOutOfRange, match="outside 3"):
            await done(ticket.stamp(version))
    await done(ticket.stamp(3))
    with pytest.raises(AlreadyStamped):
        await done(ticket.stamp(3))
    with pytest.raises(InvalidReward):
        await done(ticket.finish("x", float("nan")))
    with pytest.raises(VersionWentBack, match="serves version 3"):
        await done(buf.advance(2))
    assert await done(ticket.finish("x", 1.0)) == "accepted" and (await ledger(buf)).buffered == 1


async def test_what_is_not_a_state_is_refused(make: Make) -> None:
    buf = make(batch_groups=1, group_size=1)
    await run((await take(buf, 1))[0], "x")
    state = await done(buf.state_dict())
    wrongs: list[dict[str, Any]] = [{}, state | {"issued": 7}, state | {"limits": None}]
    for wrong in wrongs:
        with pytest.raises(InvalidState):
            await done(type(buf).restore(wrong, KEYS))


async def test_save_and_restore(make: Make) -> None:
    buf = make(batch_groups=2, group_size=2, alpha=0)
    tickets = await take(buf, 4)
    for ticket in tickets[:3]:
        await run(ticket, ["payload", ticket.id])
    state = await done(buf.state_dict())
    again = await done(type(buf).restore(state, KEYS))
    (reissued,) = await take(again, 1)
    assert (reissued.key, reissued.member) == (1, 2)
    await run(reissued, ["payload", 4])
    batch = await again.get_batch()
    assert sorted(s.payload for s in batch.samples) == [["payload", i] for i in (0, 1, 2, 4)]
    assert batch.ledger.balanced and batch.ledger.cancelled == 1
    if hasattr(again, "leave"):
        await again.leave()


async def test_patience_is_for_either_face(make: Make) -> None:
    with pytest.raises(InvalidConfig, match="patience=-1"):
        make(batch_groups=1, group_size=1, patience=-1)
    buf = make(batch_groups=1, group_size=1, patience=1.0)
    await run((await take(buf, 1))[0], "x")
    again = await done(type(buf).restore(await done(buf.state_dict()), KEYS, patience=1.0))
    assert (await again.get_batch()).samples[0].payload == "x"
    if hasattr(again, "leave"):
        await again.leave()


async def test_what_a_codec_can_not_do_is_told(make: Make) -> None:
    buf = make(batch_groups=1, group_size=1)
    first, second = await take(buf, 2)
    await run(first, "text")
    state = await done(buf.state_dict())
    with pytest.raises(InvalidState, match="payload of ticket 0"):
        await done(type(buf).restore(state, KEYS, codec=MsgpackCodec(int)))
    await run(second, complex(1, 2))
    with pytest.raises(Unsavable, match="payload of ticket 1"):
        await done(buf.state_dict())
