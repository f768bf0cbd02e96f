"""Saving and restoring: nothing lost, nothing twice, no burst, no pickle."""

from __future__ import annotations

from itertools import count
from typing import Any

import msgspec
import pytest

from samplebuffer import InvalidState, MsgpackCodec, SampleBuffer, Ticket


class Payload(msgspec.Struct):
    tokens: list[int]


def buffer(keys=None, **sizes) -> SampleBuffer:
    return SampleBuffer(
        count() if keys is None else keys, **({"batch_groups": 2, "group_size": 2, "alpha": 1} | sizes)
    )


def take_all(buf: SampleBuffer) -> list[Ticket]:
    tickets = []
    while (ticket := buf.next_ticket_nowait()) is not None:
        tickets.append(ticket)
    return tickets


def run(ticket: Ticket, payload: Any = None) -> None:
    ticket.stamp(ticket.issued_version)
    ticket.finish(payload, 0.5)


def test_restore_keeps_the_finished_and_reissues_the_rest_once() -> None:
    buf = buffer(version=7)
    tickets = take_all(buf)
    run(tickets[0])
    run(tickets[2], [1, 2])
    run(tickets[3], "x")
    tickets[4].fail("lost")
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(buf.state_dict()))
    again = SampleBuffer.restore(state, count())
    assert again.ledger.balanced and again.ledger.running == 0 and again.ledger.cancelled == 4
    assert again.stats().version == 7
    reissued = take_all(again)
    assert [t.key for t in reissued] == [0, 2, 2, 3, 3], "no new key: the capacity is full"
    assert min(t.id for t in reissued) == 8 and (reissued[0].group_id, reissued[0].member) == (0, 2)
    for ticket in reissued:
        run(ticket)
    batches = [again.get_batch_nowait(), again.get_batch_nowait()]
    groups = [group for batch in batches if batch for group in batch.groups]
    assert [group.key for group in groups] == [0, 1, 2, 3]
    assert [sample.payload for sample in groups[1].samples] == [[1, 2], "x"]
    assert take_all(again)[0].key == 4, "the keys drawn before are skipped"


def test_the_state_holds_its_moment_whatever_happens_after() -> None:
    buf = buffer()
    tickets = take_all(buf)
    run(tickets[0])
    state = buf.state_dict()
    frozen = msgspec.msgpack.encode(state)
    for ticket in tickets[1:]:
        run(ticket)
    buf.advance(5)
    buf.close()
    assert msgspec.msgpack.encode(state) == frozen


def test_recycled_keys_and_a_positioned_iterator_survive() -> None:
    buf = buffer(alpha=0)
    take_all(buf)
    buf.advance(1)
    again = SampleBuffer.restore(buf.state_dict(), iter([2, 3]), skip_drawn=False)
    assert [t.key for t in take_all(again)] == [0, 0, 1, 1]
    again.advance(2)
    assert [t.key for t in take_all(again)] == [0, 0, 1, 1]
    assert again.ledger.stale == 8 and again.ledger.balanced


def test_a_restored_group_is_not_judged_again_and_the_next_one_is() -> None:
    judged = []

    def keep(group) -> bool:
        judged.append(group.key)
        return True

    buf = buffer(keep=keep)
    for ticket in take_all(buf)[:2]:
        run(ticket)
    again = SampleBuffer.restore(buf.state_dict(), count(), keep=keep)
    for ticket in take_all(again)[:2]:
        run(ticket)
    assert judged == [0, 1] and again.get_batch_nowait() is not None


def test_typed_payloads_go_through_the_given_codec() -> None:
    buf = buffer(batch_groups=1)
    codec = MsgpackCodec(Payload)
    for ticket in take_all(buf)[:2]:
        run(ticket, Payload([1, 2, 3]))
    again = SampleBuffer.restore(buf.state_dict(codec), count(), codec=codec)
    batch = again.get_batch_nowait()
    assert batch is not None and batch.samples[0].payload == Payload([1, 2, 3])
    with pytest.raises(TypeError):
        bad = buffer(batch_groups=1)
        run(take_all(bad)[0], object())
        bad.state_dict()


def test_a_state_after_close_restores_the_unfinished() -> None:
    buf = buffer()
    tickets = take_all(buf)
    run(tickets[0])
    buf.close()
    again = SampleBuffer.restore(buf.state_dict(), count())
    assert len(take_all(again)) == 7 and again.ledger.balanced


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"version": "x"},
        {"version": 9},
        {"limits": None},
        {"limits": {"alpha": "much"}},
        {"groups": [{"id": 1}]},
        {"ended": {"nowhere": 1}},
        {"issued": 7},
        {"version": -1},
        {"drawn": -1},
        {"ended": {"stale": -1}},
        {"limits": {"alpha": "1/0"}},
        {"opened": 3},
        {"groups": "twice"},
        {"groups": "many"},
        {"groups": {"lost": 9}},
        {"groups": {"samples": {"ticket_id": 8}}},
        {"groups": {"samples": {"start_version": 1}}},
        {"groups": {"samples": {"payload": "text"}}},
        {"groups": {"samples": {"reward": float("nan")}}},
        {"groups": {"samples": {"member": 2}}},
    ],
)
def test_what_is_not_a_state_is_refused(change: dict[str, Any]) -> None:
    buf = buffer()
    run(take_all(buf)[0])
    state = buf.state_dict()
    with pytest.raises(InvalidState, match="state"):
        SampleBuffer.restore(changed(state, change), count())


def changed(state: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """The state with values replaced, in dictionaries and in the first item of lists."""
    state = dict(state)
    for key, value in change.items():
        if isinstance(value, dict):
            first = state[key]
            state[key] = [changed(first[0], value), *first[1:]] if isinstance(first, list) else changed(first, value)
        elif value in ("twice", "many"):
            state[key] = state[key] * (2 if value == "twice" else 100)
        else:
            state[key] = value
    return state
