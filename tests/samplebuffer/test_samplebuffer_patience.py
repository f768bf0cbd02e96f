"""A batch that waits for groups that the next version would end: how long, for whom, what ends it. Virtual time."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samplebuffer import Closed, InvalidConfig, SampleBuffer, Ticket
from samplebuffer.patience import Patience

BATCH_S = 100.0
Taken = Any  # the keys of a batch, and seconds


def run(ticket: Ticket) -> None:
    ticket.stamp(ticket.issued_version)
    ticket.finish(None, 1.0)


async def pair(buf: SampleBuffer) -> list[Ticket]:
    return [await buf.next_ticket() for _ in range(2)]


async def at_the_bound(patience: float = 1.0, **sizes: Any) -> tuple[SampleBuffer, list[Ticket], list[Ticket]]:
    """A buffer whose batches, of two groups of one, took BATCH_S; it runs two groups at the bound, and two fresh."""
    buf = SampleBuffer(count(), batch_groups=2, group_size=1, alpha=1, patience=patience, **sizes)
    first, old = await pair(buf), await pair(buf)
    await asyncio.sleep(BATCH_S)
    for ticket in first:
        run(ticket)
    await buf.get_batch()
    buf.advance(1)
    second = await pair(buf)
    await asyncio.sleep(BATCH_S)
    for ticket in second:
        run(ticket)
    await buf.get_batch()
    return buf, old, await pair(buf)


async def complete(buf: SampleBuffer, fresh: list[Ticket], timeout: float | None = None) -> asyncio.Task[Taken]:
    """Ask for a batch, then complete the fresh groups. Gives the keys of the batch and how long it waited since."""
    start = asyncio.get_running_loop().time()

    async def take() -> Taken:
        batch = await buf.get_batch(timeout)
        return [group.key for group in batch.groups], asyncio.get_running_loop().time() - start

    consumer = asyncio.create_task(take())
    await asyncio.sleep(0)
    for ticket in fresh:
        run(ticket)
    return consumer


async def test_a_group_at_the_bound_that_completes_in_time_is_in_the_batch() -> None:
    buf, old, fresh = await at_the_bound()
    consumer = await complete(buf, fresh)
    await asyncio.sleep(30)
    run(old[0])
    await asyncio.sleep(10)
    run(old[1])
    assert await consumer == ([ticket.key for ticket in old], pytest.approx(40))
    assert buf.advance(2) == [] and buf.ledger.stale == 0
    assert buf.stats().waits.patience_s == pytest.approx(40)


async def test_the_wait_ends_when_it_has_cost_what_it_could_save() -> None:
    buf, old, fresh = await at_the_bound()
    consumer = await complete(buf, fresh)
    await asyncio.sleep(30)
    run(old[0])
    assert await consumer == ([old[0].key, fresh[0].key], pytest.approx(BATCH_S / 2))
    buf, old, fresh = await at_the_bound()
    assert await (await complete(buf, fresh)) == ([ticket.key for ticket in fresh], pytest.approx(BATCH_S))
    assert set(buf.advance(2)) == set(old)


@pytest.mark.parametrize("share", [0.0, 0.25, 2.0])
async def test_the_share_scales_the_wait(share: float) -> None:
    buf, _, fresh = await at_the_bound(share)
    assert (await (await complete(buf, fresh)))[1] == pytest.approx(share * BATCH_S)


async def test_a_batch_that_is_there_when_it_is_asked_for_goes_at_once() -> None:
    buf, _, fresh = await at_the_bound()
    for ticket in fresh:
        run(ticket)
    start = asyncio.get_running_loop().time()
    await buf.get_batch()
    assert asyncio.get_running_loop().time() == start


@pytest.mark.parametrize("how", ["filtered", "given up", "replaced"])
async def test_a_group_that_is_no_longer_at_stake_is_not_waited_for(how: str) -> None:
    budget = {"max_replacements": 0} if how == "given up" else {}
    buf, old, fresh = await at_the_bound(keep=lambda group: group.samples[0].reward > 0, **budget)
    consumer = await complete(buf, fresh)
    await asyncio.sleep(10)
    for ticket in old:
        if how == "filtered":
            ticket.stamp(ticket.issued_version)
            ticket.finish(None, 0.0)
        else:
            ticket.fail("broken")
    assert await consumer == ([ticket.key for ticket in fresh], pytest.approx(10))


async def test_without_eviction_nothing_is_at_stake() -> None:
    buf, _, fresh = await at_the_bound(evict=False)
    assert (await (await complete(buf, fresh)))[1] == 0


async def test_what_the_batch_cannot_hold_is_not_waited_for() -> None:
    buf, old, fresh = await at_the_bound(spare_groups=2)
    consumer = await complete(buf, [*old, *fresh])
    assert await consumer == ([ticket.key for ticket in old], 0)


async def test_a_timeout_within_the_wait_gives_the_batch() -> None:
    buf, _, fresh = await at_the_bound()
    assert await (await complete(buf, fresh, timeout=20)) == ([t.key for t in fresh], pytest.approx(20, abs=0.01))


async def test_the_version_that_was_feared_ends_the_wait() -> None:
    buf, old, fresh = await at_the_bound()
    consumer = await complete(buf, fresh)
    await asyncio.sleep(10)
    assert set(buf.advance(2)) == set(old)
    for ticket in await pair(buf):
        run(ticket)
    assert (await consumer)[1] == pytest.approx(10)


async def test_close_and_cancellation_end_the_wait() -> None:
    buf, _, fresh = await at_the_bound()
    consumer = await complete(buf, fresh)
    await asyncio.sleep(10)
    consumer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await consumer
    assert buf.ledger.buffered == 2 and buf.stats().waits.consumers == 0
    other = asyncio.create_task(buf.get_batch())
    assert len((await other).groups) == 2  # it was there: nothing was lost with the first consumer
    buf, _, fresh = await at_the_bound()
    consumer = await complete(buf, fresh)
    await asyncio.sleep(10)
    buf.close()
    with pytest.raises(Closed):
        await consumer


async def test_another_consumer_may_take_the_batch_meanwhile() -> None:
    buf, old, fresh = await at_the_bound()
    consumer = await complete(buf, fresh)
    await asyncio.sleep(10)
    await buf.get_batch()
    for ticket in old:
        run(ticket)
    assert await consumer == ([ticket.key for ticket in old], pytest.approx(10))


@pytest.mark.parametrize("patience", [-0.1, float("nan"), float("inf"), True, "1"])
def test_a_share_that_is_none_is_refused(patience: Any) -> None:
    with pytest.raises(InvalidConfig, match="patience"):
        SampleBuffer(count(), batch_groups=1, group_size=1, patience=patience)


@given(
    st.floats(0, 10),
    st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 1)), max_size=20),
    st.integers(0, 100),
    st.integers(1, 50),
)
def test_no_wait_is_longer_than_its_share_of_a_batch(
    share: float, batches: list[tuple[float, float]], at_stake: int, batch_groups: int
) -> None:
    patience, now, longest = Patience(share), 0.0, 0.0
    for took, part in batches:
        now += took
        patience.handed_out(now, part * took)
        longest = max(longest, took)
    assert 0 <= patience.seconds(at_stake, batch_groups) <= share * longest * (1 + 1e-9)
