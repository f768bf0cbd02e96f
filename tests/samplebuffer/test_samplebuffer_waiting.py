"""Who waits, what wakes them, and what a cancelled waiter leaves behind. No sleeps: time is virtual."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest

from samplebuffer import Batch, Closed, Exhausted, SampleBuffer, Starved, Ticket


def buffer(keys=None, **sizes) -> SampleBuffer:
    return SampleBuffer(
        count() if keys is None else keys, **({"batch_groups": 1, "group_size": 2, "alpha": 0} | sizes)
    )


def run(ticket: Ticket) -> None:
    ticket.stamp(ticket.issued_version)
    ticket.finish(None, 1.0)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def blocked(buf: SampleBuffer, n: int) -> list[asyncio.Task[Ticket]]:
    tasks = []
    for _ in range(n):
        tasks.append(asyncio.create_task(buf.next_ticket()))
        await settle()
    assert not any(task.done() for task in tasks)
    return tasks


async def test_tickets_go_to_waiters_in_order_of_arrival() -> None:
    buf = buffer()
    first = [await buf.next_ticket() for _ in range(2)]
    waiters = await blocked(buf, 5)
    for ticket in first:
        run(ticket)
    await buf.get_batch()
    await settle()
    assert [task.done() for task in waiters] == [True, True, False, False, False]
    assert [task.result().id for task in waiters[:2]] == [2, 3]
    assert buf.next_ticket_nowait() is None
    waiters[0].result().fail("again")
    await settle()
    assert waiters[2].result().id == 4 and not waiters[3].done()
    buf.close()
    assert [type(e) for e in await asyncio.gather(*waiters[3:], return_exceptions=True)] == [Closed, Closed]


@pytest.mark.parametrize("given_first", [False, True])
async def test_a_cancelled_waiter_passes_its_turn_on(given_first: bool) -> None:
    buf = buffer()
    tickets = [await buf.next_ticket() for _ in range(2)]
    waiters = await blocked(buf, 2)
    if given_first:
        tickets[0].cancel()  # gives the replacement to the first waiter, which has not run yet
        waiters[0].cancel()
    else:
        waiters[0].cancel()
        tickets[0].cancel()
    await settle()
    assert waiters[0].cancelled() and waiters[1].done()
    assert waiters[1].result().key == 0 and buf.ledger.running == 2 and buf.ledger.balanced
    assert buf.ledger.cancelled == 1 + given_first
    buf.close()


async def test_a_withdrawn_ticket_does_not_count_against_the_groups_budget() -> None:
    buf = buffer(max_replacements=0)
    _first, second = [await buf.next_ticket() for _ in range(2)]
    waiters = await blocked(buf, 1)
    buf.advance(1)
    waiters[0].cancel()
    await settle()
    assert second.state == "stale" and buf.stats().groups.given_up == 0 and buf.ledger.balanced
    assert (await buf.next_ticket()).key == 0


async def test_cancelled_waiters_leave_nothing_in_the_queue() -> None:
    buf = buffer()
    for _ in range(2):
        await buf.next_ticket()
    for _ in range(50):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(buf.next_ticket(), 1)
    assert buf.stats().waits.producers == 0


async def test_get_batch_wakes_on_the_last_member_and_loses_nothing_when_cancelled() -> None:
    buf = buffer()
    tickets = [await buf.next_ticket() for _ in range(2)]
    consumer = asyncio.create_task(buf.get_batch())
    other = asyncio.create_task(buf.get_batch())
    run(tickets[0])
    await settle()
    assert not consumer.done()
    run(tickets[1])
    consumer.cancel()  # woken, and cancelled before it looked
    await settle()
    assert consumer.cancelled()
    batch = other.result()
    assert isinstance(batch, Batch) and buf.ledger.delivered == 2
    buf.close()


async def test_get_batch_times_out_on_the_loops_clock_and_reports_its_waits() -> None:
    buf = buffer()
    tickets = [await buf.next_ticket() for _ in range(2)]
    with pytest.raises(TimeoutError):
        await buf.get_batch(timeout=30)
    await asyncio.sleep(30)
    for ticket in tickets:
        run(ticket)
    await buf.get_batch(timeout=0)
    waits = buf.stats().waits
    assert waits.get_batch_s == pytest.approx(30) and waits.get_batch_share == pytest.approx(0.5)
    assert waits.consumers == 0


async def test_consumers_that_wait_together_count_once() -> None:
    buf = buffer()

    async def wait(after: float) -> None:
        await asyncio.sleep(after)
        with pytest.raises(TimeoutError):
            await buf.get_batch(timeout=20)

    await asyncio.gather(wait(0), wait(10), wait(60))
    waits = buf.stats().waits
    assert waits.get_batch_s == pytest.approx(50) and waits.get_batch_share == pytest.approx(50 / 80)


async def test_an_advance_between_wake_and_look_is_seen() -> None:
    buf = buffer()
    tickets = [await buf.next_ticket() for _ in range(2)]
    consumer = asyncio.create_task(buf.get_batch())
    await settle()
    for ticket in tickets:
        run(ticket)
    buf.advance(1)
    await settle()
    assert not consumer.done() and buf.ledger.stale == 2
    for ticket in [await buf.next_ticket() for _ in range(2)]:
        run(ticket)
    assert (await consumer).max_staleness == 0


async def test_the_end_of_the_tasks_wakes_everyone() -> None:
    buf = buffer(keys=["a"], batch_groups=1)
    tickets = [await buf.next_ticket() for _ in range(2)]
    waiters = await blocked(buf, 2)
    for ticket in tickets:
        run(ticket)
    consumers = [asyncio.create_task(buf.get_batch(partial=partial)) for partial in (True, False, True)]
    answers = await asyncio.gather(*consumers, *waiters, return_exceptions=True)
    assert [type(answer) for answer in answers] == [Batch, Starved, Starved, Exhausted, Exhausted]


async def test_a_waiting_consumer_learns_that_the_last_group_was_given_up() -> None:
    buf = buffer(keys=["a"], max_replacements=0)
    ticket = await buf.next_ticket()
    consumer = asyncio.create_task(buf.get_batch())
    await settle()
    ticket.fail("broken")
    with pytest.raises(Starved, match="0 groups"):
        await consumer


async def test_a_waiting_consumer_learns_from_a_producer_that_the_tasks_have_ended() -> None:
    buf = buffer(keys=["a"], batch_groups=2, alpha=0)
    consumer = asyncio.create_task(buf.get_batch(partial=True))
    await settle()
    for ticket in [await buf.next_ticket() for _ in range(2)]:
        run(ticket)
    assert len((await consumer).groups) == 1


async def test_starved_is_known_as_soon_as_the_last_key_is_taken() -> None:
    buf = buffer(keys=["a"], batch_groups=2)
    consumer = asyncio.create_task(buf.get_batch())
    await settle()
    await buf.next_ticket()
    with pytest.raises(Starved, match="1 groups are left, a batch needs 2"):
        await consumer


async def test_close_wakes_producers_and_consumers() -> None:
    buf = buffer()
    for _ in range(2):
        await buf.next_ticket()
    waiting = [*await blocked(buf, 3), asyncio.create_task(buf.get_batch())]
    await settle()
    buf.close()
    assert [type(e) for e in await asyncio.gather(*waiting, return_exceptions=True)] == [Closed] * 4


async def test_filtering_wakes_the_producers_that_wait_for_room() -> None:
    buf = buffer(keep=lambda group: False)
    tickets = [await buf.next_ticket() for _ in range(2)]
    waiters = await blocked(buf, 2)
    for ticket in tickets:
        run(ticket)
    assert {t.key for t in await asyncio.gather(*waiters)} == {1}
