"""Batches whose hand-out can get lost."""

from __future__ import annotations

from itertools import count

import pytest

from samplebuffer.core import Core
from samplebuffer.limits import make_limits
from samplebuffer.loans import confirm, drop, reclaim
from samplebuffer.state import MsgpackCodec, load, save
from samplebuffer.tasks import Tasks
from samplebuffer.values import Batch


def full_core(alpha: float = 1, max_replacements: int = 4) -> Core:
    core = Core(Tasks(count()), make_limits(2, 2, alpha, 0, 0, max_replacements))
    work(core)
    return core


def work(core: Core) -> None:
    while (ticket := core.take_ticket()) is not None:
        ticket.stamp(core.version)
        ticket.finish(ticket.id, 1.0)


def lend(core: Core) -> Batch:
    batch = core.take_batch(lend=True)
    assert batch is not None
    return batch


def test_a_lent_batch_occupies_its_room_until_it_is_confirmed() -> None:
    core = full_core()
    batch = lend(core)
    assert core.take_ticket() is None and core.book.ledger.delivered == 4
    confirm(core, batch)
    work(core)
    assert core.opened == 6 and core.alive == 4


def test_a_reclaimed_batch_comes_again_first_and_is_counted_once() -> None:
    core = full_core()
    reclaim(core, lend(core))
    assert core.book.ledger.delivered == 0 and core.book.delivered_staleness.total() == 0
    again = core.take_batch()
    assert again is not None and [group.key for group in again.groups] == [0, 1]
    assert core.book.ledger.delivered == 4 and core.book.ledger.balanced


def test_a_batch_reclaimed_after_an_advance_is_as_old_as_it_is_by_then() -> None:
    core = full_core()
    batch = lend(core)
    core.advance(2)
    reclaim(core, batch)
    assert core.book.ledger.stale == 8 and core.alive == 0 and core.book.ledger.balanced
    work(core)
    again = core.take_batch()
    assert again is not None and [group.key for group in again.groups] == [0, 1] and again.max_staleness == 0


def test_members_whose_payload_is_lost_are_failed_and_replaced() -> None:
    core = full_core()
    batch = lend(core)
    reclaim(core, batch, lost={batch.samples[0].ticket_id})
    assert core.book.ledger.failed == 1 and len(core.shelf) == 3
    ticket = core.take_ticket()
    assert ticket is not None and (ticket.group_id, ticket.member) == (0, 2)


def test_a_reclaimed_group_asks_for_replacements_though_others_were_issued_meanwhile() -> None:
    core = full_core()
    batch = lend(core)
    for _ in range(4):  # the queue of wanting groups is worked off while the batch travels
        assert core.take_ticket() is None
    reclaim(core, batch, lost={s.ticket_id for s in batch.samples})
    tickets = [core.take_ticket() for _ in range(4)]
    assert [ticket.group_id for ticket in tickets if ticket] == [0, 0, 1, 1]


def test_lost_payloads_count_in_the_budget() -> None:
    core = full_core(max_replacements=1)
    drop(core, {0, 1, 2})
    assert [given_up.key for given_up in core.given_up] == [0] and core.given_up[0].error == "payload lost"
    assert core.book.ledger.failed == 3 and core.book.ledger.balanced
    ticket = core.take_ticket()
    assert ticket is not None and ticket.group_id == 1


def test_what_is_lent_is_alive_in_a_state_and_its_key_comes_again_when_it_has_grown_stale() -> None:
    core = full_core()
    batch = lend(core)
    fresh = load(save(core, MsgpackCodec()), count(), MsgpackCodec(), True)
    again = fresh.take_batch()
    assert again is not None and [group.key for group in again.groups] == [group.key for group in batch.groups]
    core.advance(2)
    old = load(save(core, MsgpackCodec()), count(), MsgpackCodec(), True)
    ticket = old.take_ticket()
    assert ticket is not None and ticket.key == batch.groups[0].key
    assert old.book.ledger.stale == 8 and old.book.ledger.balanced and core.book.ledger.delivered == 4


@pytest.mark.parametrize("ends", [{"rest": True}, {"cancel_spares": True}])
def test_a_batch_that_did_not_arrive_ends_the_rest_it_began(ends: dict[str, bool]) -> None:
    """No version follows, and nobody else would make the member that is lost."""
    core = full_core()
    batch = core.take_batch(lend=True, **ends)
    assert batch is not None and core.resting
    reclaim(core, batch, lost={batch.samples[0].ticket_id})
    work(core)
    again = core.take_batch()
    assert again is not None and [group.key for group in again.groups] == [0, 1]
