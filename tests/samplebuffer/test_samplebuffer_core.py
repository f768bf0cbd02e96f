"""The rules of the buffer, one at a time, without a loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from itertools import count

import msgspec
import pytest

from samplebuffer import (
    AlreadyStamped,
    Closed,
    Exhausted,
    InvalidReward,
    NotStamped,
    SampleBuffer,
    StampOutOfRange,
    Starved,
    Ticket,
    VersionWentBack,
)


def buffer(keys=None, **sizes) -> SampleBuffer:
    return SampleBuffer(
        count() if keys is None else keys, **({"batch_groups": 2, "group_size": 2, "alpha": 1} | sizes)
    )


def take(buf: SampleBuffer, n: int = 1) -> list[Ticket]:
    tickets = [buf.next_ticket_nowait() for _ in range(n)]
    assert all(tickets)
    return [ticket for ticket in tickets if ticket]


def take_all(buf: SampleBuffer) -> list[Ticket]:
    tickets = []
    while (ticket := buf.next_ticket_nowait()) is not None:
        tickets.append(ticket)
    return tickets


def run(ticket: Ticket, version: int | None = None, reward: float = 1.0):
    ticket.stamp(ticket.issued_version if version is None else version)
    return ticket.finish({"id": ticket.id}, reward)


def test_a_batch_is_whole_groups_oldest_start_first() -> None:
    buf = buffer(alpha=3)
    tickets = take_all(buf)
    assert len(tickets) == 8 * 2
    buf.advance(1)
    for ticket in tickets[:4]:
        run(ticket, version=1)
    for ticket in tickets[4:8]:
        run(ticket, version=0)
    batch = buf.get_batch_nowait(trainer_version=2)
    assert batch is not None
    assert [group.key for group in batch.groups] == [2, 3]
    assert batch.version == 1 and batch.max_staleness == 1 and batch.max_lag == 2
    sample = batch.groups[0].samples[1]
    assert (sample.ticket_id, sample.start_version, sample.payload, sample.reward) == (5, 0, {"id": 5}, 1.0)
    assert len(batch.samples) == 4 and batch.ledger.delivered == 4 and batch.ledger.balanced
    second = buf.get_batch_nowait()
    assert second is not None and [group.key for group in second.groups] == [0, 1]
    assert buf.get_batch_nowait() is None


def test_a_trainer_version_that_is_none_takes_no_batch() -> None:
    buf = buffer()
    for ticket in take(buf, 4):
        run(ticket)
    with pytest.raises(TypeError):
        buf.get_batch_nowait(trainer_version="1")  # type: ignore[arg-type]
    assert buf.ledger.delivered == 0 and buf.get_batch_nowait(trainer_version=1) is not None


def test_capacity_bounds_the_groups_alive_and_a_batch_frees_it() -> None:
    buf = buffer(alpha=0.5, spare_groups=1)
    tickets = take_all(buf)
    assert buf.stats().groups.alive == buf.stats().capacity == 4 and len(tickets) == 8
    for ticket in tickets[:4]:
        run(ticket)
    assert buf.next_ticket_nowait() is None
    assert buf.get_batch_nowait() is not None
    assert len(take_all(buf)) == 4


def test_a_full_group_cancels_its_surplus_and_the_late_get_an_answer() -> None:
    buf = buffer(spare_members=2)
    tickets, reasons = take(buf, 4), list[str]()
    for ticket in tickets:
        assert ticket.group_id == 0
        ticket.on_cancel(reasons.append)
    assert run(tickets[3]) == "accepted" and not reasons
    assert run(tickets[1]) == "accepted" and reasons == ["surplus", "surplus"]
    assert buf.ledger.surplus == 2
    tickets[0].stamp(99)
    assert tickets[0].finish("late", float("nan")) == "surplus"
    assert not tickets[0].fail("late") and not tickets[0].cancel()
    assert tickets[1].finish("again", 1.0) == "ended"
    tickets[2].on_cancel(reasons.append)
    assert reasons == ["surplus"] * 3, "a callback that comes too late is called at once"
    assert buf.ledger.balanced and buf.ledger.buffered == 2


def test_spares_not_issued_yet_are_never_issued() -> None:
    buf = buffer(spare_members=2)
    for ticket in take(buf, 2):
        run(ticket)
    assert take(buf)[0].group_id == 1


def test_failed_and_cancelled_members_are_replaced_in_the_oldest_group_first() -> None:
    buf = buffer()
    tickets = take(buf, 6)
    tickets[3].cancel()
    tickets[0].fail(RuntimeError("no"))
    replaced = take(buf, 3)
    assert [(t.group_id, t.member) for t in replaced] == [(0, 2), (1, 2), (3, 0)]
    assert (buf.ledger.failed, buf.ledger.cancelled) == (1, 1) and buf.ledger.balanced


def test_a_key_that_keeps_failing_is_given_up_and_its_members_are_failed() -> None:
    buf = buffer(max_replacements=2, spare_members=1)
    good, *bad = take(buf, 3)
    reasons: list[str] = []
    run(good)
    for _ in range(2):
        bad.pop(0).fail(ValueError("broken task"))
        bad += take(buf)
    bad[1].on_cancel(reasons.append)
    bad[0].fail(ValueError("broken task"))
    assert reasons == ["failed"] and bad[1].finish("late", 0.0) == "ended"
    (given_up,) = buf.stats().given_up
    assert (given_up.key, given_up.lost, given_up.error) == (0, 3, "ValueError: broken task")
    assert buf.ledger.failed == 5 and buf.ledger.buffered == 0 and buf.ledger.balanced
    assert take(buf)[0].key == 1


def test_filtering_judges_whole_groups_and_frees_room_at_once() -> None:
    judged = []

    def keep(group) -> bool:
        judged.append([sample.reward for sample in group.samples])
        return len({sample.reward for sample in group.samples}) > 1

    buf = buffer(keep=keep, alpha=0, spare_members=1)
    tickets = take_all(buf)
    run(tickets[0], reward=0.0)
    assert run(tickets[1], reward=0.0) == "accepted"
    assert judged == [[0.0, 0.0]]
    assert buf.ledger.filtered == 2 and buf.ledger.surplus == 1 and buf.stats().groups.filtered == 1
    assert [t.key for t in take_all(buf)] == [2, 2, 2]


def test_a_filter_that_raises_leaves_the_member_running() -> None:
    def keep(group) -> bool:
        raise ZeroDivisionError

    buf = buffer(keep=keep)
    first, last = take(buf, 2)
    run(first)
    with pytest.raises(ZeroDivisionError):
        run(last)
    assert last.state == "running" and buf.ledger.running == 1 and buf.ledger.buffered == 1
    assert last.fail("the filter raised") and take(buf)[0].group_id == 0


def test_advance_ends_the_stale_replaces_them_and_keeps_the_rest() -> None:
    buf = buffer(group_size=4, alpha=1)
    tickets, reasons = take(buf, 4), list[str]()
    buf.advance(1)
    old, unstamped, *fresh = tickets
    for ticket in tickets:
        ticket.on_cancel(reasons.append)
    run(old, version=0)
    for ticket in fresh:
        run(ticket, version=1)
    assert buf.advance(2) == [unstamped] and reasons == ["stale"]
    assert unstamped.finish("late", 1.0) == "stale" and buf.ledger.stale == 2
    assert buf.advance(2) == [] and buf.ledger.stale == 2, "advance is idempotent"
    assert [(t.group_id, t.member) for t in take(buf, 2)] == [(0, 4), (0, 5)]
    assert buf.ledger.balanced


def test_a_member_exactly_at_the_bound_stays_and_the_place_of_the_stale_is_offered() -> None:
    buf = buffer(group_size=4, alpha=1)
    first = take(buf, 2)
    buf.advance(1)
    second = take(buf, 4)  # two of the first group, then two of the next: the first group asks for nothing more
    for ticket in first + second:
        ticket.stamp(ticket.issued_version)
    assert buf.advance(2) == first
    assert [ticket.state for ticket in second] == ["running"] * 4
    assert [t.group_id for t in take(buf, 4)] == [0, 0, 1, 1]


def test_a_complete_group_that_loses_members_waits_for_their_replacement() -> None:
    buf = buffer(group_size=2, batch_groups=1)
    first, second = take(buf, 2)
    run(first, version=0)
    buf.advance(1)
    run(second, version=1)
    assert buf.stats().groups.complete == 1
    buf.advance(2)
    assert buf.stats().groups.complete == 0 and buf.get_batch_nowait() is None
    (replacement,) = take(buf)
    assert replacement.group_id == 0
    run(replacement)
    batch = buf.get_batch_nowait()
    assert batch is not None and sorted(s.start_version for s in batch.samples) == [1, 2]
    assert batch.max_staleness == 1


def test_a_group_that_would_keep_fewer_than_half_is_recycled_before_new_keys() -> None:
    buf = buffer(group_size=4, alpha=0, batch_groups=2, max_replacements=1)
    tickets = take_all(buf)
    run(tickets[0])
    tickets[4].fail("counts in the budget of the key, also after recycling")
    ended = buf.advance(1)
    assert len(ended) == 6 and buf.ledger.stale == 7 and buf.ledger.balanced
    assert buf.stats().groups.alive == 0 and buf.stats().groups.recycled == 2
    again = take_all(buf)
    assert [t.key for t in again] == [0] * 4 + [1] * 4 and {t.group_id for t in again} == {2, 3}
    again[4].fail("once more")
    assert [given_up.lost for given_up in buf.stats().given_up] == [2]


def test_alpha_zero_in_the_pipelined_order() -> None:
    buf = buffer(alpha=0)
    for version in range(5):
        for ticket in take_all(buf):
            run(ticket)
        batch = buf.get_batch_nowait(trainer_version=version + 1)
        assert batch is not None and batch.max_staleness == 0 and batch.max_lag == 1
        buf.advance(version + 1)


def test_sync_cancels_spares_with_the_batch_and_rests_until_advance() -> None:
    buf = buffer(alpha=0, spare_groups=2)
    tickets = take_all(buf)
    for ticket in tickets[:5]:
        run(ticket)
    batch = buf.get_batch_nowait(cancel_spares=True)
    assert batch is not None and batch.max_lag == 0
    assert buf.ledger.surplus == 4 and buf.ledger.running == 0 and batch.ledger == buf.ledger
    assert tickets[5].state == "surplus" and tickets[6].finish("late", 0.0) == "surplus"
    assert buf.next_ticket_nowait() is None
    assert buf.advance(1) == []
    assert [t.key for t in take_all(buf)] == [2, 2, 3, 3, 4, 4, 5, 5]


def test_starved_when_the_tasks_end_and_partial_hands_out_the_rest() -> None:
    buf = buffer(keys=["a", "b", "c"])
    tickets = take(buf, 6)
    for ticket in tickets[:4]:
        run(ticket)
    assert buf.get_batch_nowait() is not None
    with pytest.raises(Starved, match="after 3 keys; 1 groups are left, a batch needs 2") as starved:
        buf.get_batch_nowait()
    assert starved.value.ledger.running == 2
    assert buf.get_batch_nowait(partial=True) is None, "the last group still runs"
    assert buf.next_ticket_nowait() is None, "it may need a replacement yet"
    for ticket in tickets[4:]:
        run(ticket)
    rest = buf.get_batch_nowait(partial=True)
    assert rest is not None and [group.key for group in rest.groups] == ["c"]
    with pytest.raises(Starved):
        buf.get_batch_nowait(partial=True)
    with pytest.raises(Exhausted):
        buf.next_ticket_nowait()


def test_a_task_iterator_that_raises_reaches_the_consumer() -> None:
    def keys() -> Iterator[str]:
        yield "a"
        raise OSError("disk gone")

    buf = buffer(keys=keys())
    tickets = take_all(buf)
    assert len(tickets) == 2
    with pytest.raises(Starved) as starved:
        buf.get_batch_nowait()
    assert isinstance(starved.value.__cause__, OSError)


def test_close_ends_the_running_and_keeps_the_finished() -> None:
    buf = buffer()
    tickets, reasons = take(buf, 3), list[str]()
    for ticket in tickets:
        ticket.on_cancel(reasons.append)
    run(tickets[0])
    buf.close()
    buf.close()
    assert reasons == ["closed", "closed"] and tickets[1].finish("late", 1.0) == "ended"
    assert buf.ledger.cancelled == 2 and buf.ledger.buffered == 1 and buf.ledger.balanced
    for ask in (buf.next_ticket_nowait, buf.get_batch_nowait):
        with pytest.raises(Closed):
            ask()


def test_a_callback_that_raises_or_calls_back_does_not_break_the_buffer(caplog) -> None:
    buf = buffer(group_size=3)
    tickets = take(buf, 3)
    seen = []

    def bad(reason) -> None:
        raise RuntimeError("callback")

    def calls_back(reason) -> None:
        seen.append((reason, buf.ledger.balanced, [t.fail("late") for t in tickets], buf.next_ticket_nowait()))

    for ticket in tickets:
        ticket.on_cancel(bad)
        ticket.on_cancel(calls_back)
    with caplog.at_level(logging.ERROR, "samplebuffer"):
        assert buf.advance(2) == tickets
    assert buf.stats().callback_errors == 3 and "callback" in caplog.text
    assert [(r, ok, late) for r, ok, late, _ in seen] == [("stale", True, [False] * 3)] * 3
    assert [again.key for *_, again in seen if again] == [0, 0, 0]


def test_a_callback_that_meets_a_cancelled_future_keeps_no_other_from_being_told() -> None:
    buf = buffer(group_size=1, spare_members=2)
    winner, *losers = take(buf, 3)
    reasons: list[str] = []

    def cancelled(reason) -> None:
        raise asyncio.CancelledError

    losers[0].on_cancel(cancelled)
    for ticket in losers:
        ticket.on_cancel(reasons.append)
    assert run(winner) == "accepted"
    assert reasons == ["surplus", "surplus"] and buf.stats().callback_errors == 1


def test_an_error_without_a_text_fails_its_member_and_gives_the_group_up() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    buf = buffer(keys=[0], batch_groups=1, max_replacements=0)
    assert take(buf)[0].fail(Mute())
    assert [given_up.error for given_up in buf.stats().given_up] == ["Mute (its text raised RuntimeError)"]
    with pytest.raises(Starved):
        buf.get_batch_nowait()


def test_misuse_names_the_ticket_and_leaves_the_buffer_as_it_was() -> None:
    buf = buffer(alpha=4)
    buf.advance(3)
    (ticket,) = take(buf)
    before = buf.state_dict()
    with pytest.raises(NotStamped, match=r"ticket 0 \(running\)"):
        ticket.finish("x", 1.0)
    for version in (2, 4, -1):
        with pytest.raises(StampOutOfRange, match=r"ticket 0 \(running\).*outside 3 .* to 3"):
            ticket.stamp(version)
    with pytest.raises(TypeError):
        ticket.stamp(3.5)  # type: ignore[arg-type]
    ticket.stamp(3)
    with pytest.raises(AlreadyStamped):
        ticket.stamp(3)
    for reward in (float("nan"), float("inf"), -float("inf"), None, "much", 10**400):
        with pytest.raises(InvalidReward, match="not finite"):
            ticket.finish("x", reward)  # type: ignore[arg-type]
    for version in (2, -1):
        with pytest.raises(VersionWentBack, match="serves version 3"):
            buf.advance(version)
    with pytest.raises(TypeError):
        buf.advance(float("nan"))  # type: ignore[arg-type]
    assert buf.state_dict() == before and ticket.finish("x", 1.0) == "accepted"


@pytest.mark.parametrize("length", [3.5, "3"])
def test_a_length_that_is_no_integer_is_its_producers_error_and_changes_nothing(length: object) -> None:
    buf = buffer(length=lambda payload: length)
    (ticket,) = take(buf)
    ticket.stamp(0)
    with pytest.raises(TypeError):
        ticket.finish("x", 1.0)
    assert ticket.state == "running" and buf.ledger.buffered == 0 and buf.ledger.balanced


def test_an_error_is_kept_as_a_text_that_can_be_saved() -> None:
    buf = buffer(max_replacements=0)
    take(buf)[0].fail(OSError("\udcff" + "x" * 5000))
    (given_up,) = buf.stats().given_up
    assert given_up.error.startswith("OSError: ?xx") and len(given_up.error) == 1000
    assert msgspec.msgpack.encode(buf.state_dict())


def test_stats_tell_staleness_in_flight_in_queue_and_at_hand_out() -> None:
    buf = buffer(alpha=2, batch_groups=1)
    tickets = take_all(buf)
    buf.advance(2)
    for ticket in tickets[:2]:
        run(ticket, version=1)
    tickets[2].stamp(2)
    off = buf.stats().off_policy
    assert (off.in_flight.count, off.in_flight.max, off.in_flight.mean) == (4, 2, 1.5)
    assert (off.in_queue.count, off.in_queue.max, off.in_queue.mean) == (2, 1, 1.0)
    assert buf.get_batch_nowait(trainer_version=3) is not None
    off = buf.stats().off_policy
    assert (off.delivered.count, off.delivered.max, off.trainer_lag.max) == (2, 1, 2)
    plain = buf.stats().as_dict()
    assert plain["ledger"]["delivered"] == 2 and plain["off_policy"]["in_queue"]["count"] == 0


def test_without_eviction_the_bound_holds_at_admission_only() -> None:
    buf = buffer(alpha=1, evict=False)
    slow, *rest = take_all(buf)
    assert len(rest) + 1 == 4 * 2  # the capacity is what admits
    for version in range(1, 4):
        assert buf.advance(version) == []
    for ticket in (slow, *rest):
        assert run(ticket, version=0) == "accepted"
    batch = buf.get_batch_nowait()
    assert batch is not None
    assert batch.max_staleness == 3 > buf.stats().max_staleness
    again = SampleBuffer.restore(buf.state_dict(), count())
    assert again.advance(9) == []
    assert again.ledger.stale == 0
    assert again.ledger.balanced
