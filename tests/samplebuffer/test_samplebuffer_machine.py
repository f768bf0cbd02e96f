"""Random interleavings of everything, with every invariant checked after every operation.

Producers are coroutines that may be blocked in `next_ticket`, hold a ticket they have not seen yet, run it, or be
cancelled at any of these points; the loop turns only when the rule `turn` says so. The model keeps its own account of
tickets and keys, from what the public interface answers; the core is opened only to compare.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from itertools import count
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from samplebuffer import Batch, Closed, Exhausted, Group, SampleBuffer, SampleBufferError, Starved, Ticket
from samplebuffer.group import OpenGroup
from samplebuffer.loans import confirm, drop, reclaim
from samplebuffer.tasks import Task


def members(group: OpenGroup) -> set[int]:
    return set(group.running) | {sample.ticket_id for sample in group.done}


def varied(group: Group) -> bool:
    return len({sample.reward for sample in group.samples}) > 1


class BufferMachine(RuleBasedStateMachine):
    @initialize(
        producers=st.integers(1, 64),
        keys=st.one_of(st.none(), st.integers(0, 12)),
        filters=st.booleans(),
        sizes=st.fixed_dictionaries(
            {
                "batch_groups": st.integers(1, 3),
                "group_size": st.integers(1, 4),
                "alpha": st.sampled_from([0, 0.25, 0.5, 1, 1.5, 2]),
                "spare_groups": st.integers(0, 2),
                "spare_members": st.integers(0, 2),
                "max_replacements": st.integers(0, 6),
            }
        ),
    )
    def start(self, producers: int, keys: int | None, filters: bool, sizes: dict[str, Any]) -> None:
        self.loop = asyncio.new_event_loop()
        self.n_keys, self.keep, self.sizes = keys, varied if filters else None, sizes
        self.producers: list[asyncio.Task[Ticket] | None] = [None] * producers
        self.consumer: asyncio.Task[Batch] | None = None
        self.held: list[Ticket] = []
        self.ended: list[Ticket] = []
        self.reasons: dict[int, list[str]] = {}
        self.delivered: list[Group] = []
        self.lent: list[Batch] = []
        self.filtered: list[Any] = []
        self.version = 0
        self.closed = False
        self.buf = SampleBuffer(self.keys(), keep=self.judge if filters else None, **sizes)

    def keys(self) -> Any:
        return iter(count() if self.n_keys is None else range(self.n_keys))

    def judge(self, group: Group) -> bool:
        kept = varied(group)
        if not kept:
            self.filtered.append(group.key)
        return kept

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.buf.close()
            self.closed = True
            self.turn(4)
            assert self.consumer is None and not any(self.producers)
            self.loop.close()

    # What producers do.

    @rule(n=st.integers(1, 64))
    def ask(self, n: int) -> None:
        for i, task in enumerate(self.producers[:n]):
            if task is None:
                self.producers[i] = self.loop.create_task(self.buf.next_ticket())

    @rule(turns=st.integers(1, 4))
    def turn(self, turns: int) -> None:
        for _ in range(turns):
            self.loop.run_until_complete(asyncio.sleep(0))
        for i, task in enumerate(self.producers):
            if task is not None and task.done():
                self.producers[i] = None
                if task.cancelled():
                    continue
                if isinstance(error := task.exception(), Closed):
                    assert self.closed or isinstance(error, Exhausted)
                else:
                    self.see(task.result())
        if self.consumer and self.consumer.done():
            consumer, self.consumer = self.consumer, None
            if not consumer.cancelled() and not isinstance(consumer.exception(), (Starved, Closed)):
                self.receive(consumer.result())

    def see(self, ticket: Ticket) -> None:
        self.reasons[ticket.id] = []
        ticket.on_cancel(self.reasons[ticket.id].append)
        (self.held if ticket.state == "running" else self.ended).append(ticket)

    @rule(n=st.integers(1, 16))
    def take_now(self, n: int) -> None:
        for _ in range(n):
            try:
                ticket = self.buf.next_ticket_nowait()
            except Closed:
                return
            if ticket is None:
                return
            assert ticket.issued_version == self.version
            self.see(ticket)

    @rule(n=st.integers(1, 16), reward=st.integers(0, 2))
    def take_and_finish(self, n: int, reward: int) -> None:
        self.take_now(n)
        if self.held:
            self.finish(max(len(self.held) - n, 0), n, reward)

    @rule(i=st.integers(0, 63))
    def cancel_producer(self, i: int) -> None:
        if (task := self.producers[i % len(self.producers)]) is not None:
            task.cancel()

    @precondition(lambda self: self.held)
    @rule(i=st.integers(0), behind=st.integers(0, 3))
    def stamp(self, i: int, behind: int) -> None:
        ticket = self.held[i % len(self.held)]
        version = max(ticket.issued_version, self.version - behind)
        if ticket.start_version is None:
            ticket.stamp(version)
        else:
            self.refused(lambda: ticket.stamp(version))

    @precondition(lambda self: self.held)
    @rule(start=st.integers(0), n=st.integers(1, 8), reward=st.integers(0, 2))
    def finish(self, start: int, n: int, reward: int) -> None:
        for i in range(n):
            if not self.held:
                return
            ticket = self.held[(start + i) % len(self.held)]
            if ticket.start_version is None:
                self.refused(lambda ticket=ticket: ticket.finish([ticket.id], 1.0))
                ticket.stamp(self.version)
            assert ticket.finish([ticket.id], reward=float((i + reward) % 3)) == "accepted"
            self.collect()

    @precondition(lambda self: self.held)
    @rule(i=st.integers(0), fails=st.booleans())
    def lose(self, i: int, fails: bool) -> None:
        ticket = self.held[i % len(self.held)]
        assert ticket.fail(ValueError("broken")) if fails else ticket.cancel()
        self.collect()

    @precondition(lambda self: self.ended)
    @rule(i=st.integers(0))
    def come_late(self, i: int) -> None:
        ticket = self.ended[i % len(self.ended)]
        before = self.buf.state_dict()
        ticket.stamp(self.version)
        expected = ticket.state if ticket.state in ("surplus", "stale") else "ended"
        assert ticket.finish("late", 0.0) == expected
        assert not ticket.fail("late") and not ticket.cancel()
        assert self.buf.state_dict() == before

    @precondition(lambda self: self.held)
    @rule(i=st.integers(0), what=st.sampled_from(["nan", "below", "above"]))
    def misuse(self, i: int, what: str) -> None:
        ticket = self.held[i % len(self.held)]
        if what == "nan":
            self.refused(lambda: ticket.finish(None, float("nan")))
        else:
            version = ticket.issued_version - 1 if what == "below" else self.version + 1
            self.refused(lambda: ticket.stamp(version))
        self.refused(lambda: self.buf.advance(self.version - 1))

    def refused(self, act: Any) -> None:
        before = self.buf.state_dict()
        with pytest.raises(SampleBufferError):
            act()
        assert self.buf.state_dict() == before

    def collect(self) -> list[Ticket]:
        """Move the tickets that are no longer running, each with its reason told exactly once."""
        gone = [ticket for ticket in self.held if ticket.state != "running"]
        self.held = [ticket for ticket in self.held if ticket.state == "running"]
        self.ended += gone
        return gone

    # What the trainer does.

    @rule(by=st.integers(0, 2))
    def advance(self, by: int) -> None:
        self.version += by
        cut = self.version - self.buf.stats().max_staleness
        expected = {group.id: self.after(group, cut) for group in self.buf.core.groups.values()}
        ended = self.buf.advance(self.version)
        gone = self.collect()
        assert {t.id for t in gone} <= {t.id for t in ended} and all(t.state == "stale" for t in ended)
        left = {i: members(group) for i, group in self.buf.core.groups.items() if i in expected}
        reissued = {t.id for group in self.buf.core.groups.values() for t in group.running.values()}
        for group_id, kept in expected.items():
            assert (kept is None) == (group_id not in left)
            if kept is not None:
                assert kept <= left[group_id] and (left[group_id] - kept) <= reissued
        ledger = self.buf.ledger
        assert self.buf.advance(self.version) == [] and self.buf.ledger == ledger

    @staticmethod
    def after(group: OpenGroup, cut: int) -> set[int] | None:
        """The members that an advance must leave; None when it must recycle the group."""
        fresh = {ticket.id for ticket in group.running.values() if ticket.bound >= cut}
        fresh |= {sample.ticket_id for sample in group.done if sample.start_version >= cut}
        return None if 2 * len(fresh) < len(members(group)) else fresh

    @rule(partial=st.booleans(), cancel_spares=st.booleans(), rest=st.booleans())
    def get_batch(self, partial: bool, cancel_spares: bool, rest: bool) -> None:
        alive = self.buf.core.alive
        complete = sorted((g.whole.oldest, g.id) for g in self.buf.core.groups.values() if g.whole)
        try:
            batch = self.buf.get_batch_nowait(partial=partial, cancel_spares=cancel_spares, rest=rest)
        except Closed:
            assert self.closed
            return
        except Starved:
            assert self.buf.core.tasks.over and alive < self.sizes["batch_groups"]
            assert not (partial and alive)
            return
        if batch is None:
            assert len(complete) < self.sizes["batch_groups"]
            return
        assert [(group.oldest, group.group_id) for group in batch.groups] == complete[: len(batch.groups)]
        self.receive(batch)
        self.collect()
        if cancel_spares:
            assert not self.held and self.buf.ledger.running == self.buf.ledger.buffered == 0
        if rest:
            with contextlib.suppress(Exhausted):
                assert self.buf.next_ticket_nowait() is None

    @rule()
    def wake(self) -> None:
        self.buf.wake()
        self.collect()

    def receive(self, batch: Batch) -> None:
        assert batch.ledger.balanced
        assert batch.max_staleness <= self.buf.stats().max_staleness
        assert 1 <= len(batch.groups) <= self.sizes["batch_groups"]
        for group in batch.groups:
            assert len(group.samples) == self.sizes["group_size"]
            assert len({sample.member for sample in group.samples}) == len(group.samples)
            assert all(sample.payload == [sample.ticket_id] for sample in group.samples)
            assert self.keep is None or varied(group)
        self.delivered += batch.groups

    def handed_out(self) -> list[Group]:
        return self.delivered + [group for batch in self.lent for group in batch.groups]

    @rule(partial=st.booleans(), cancel_spares=st.booleans(), rest=st.booleans())
    def lend(self, partial: bool, cancel_spares: bool, rest: bool) -> None:
        if not self.closed:
            try:
                batch = self.buf.core.take_batch(partial=partial, cancel_spares=cancel_spares, rest=rest, lend=True)
            except Starved:
                return
            if batch is not None:
                self.lent.append(batch)
            self.collect()

    @precondition(lambda self: self.lent)
    @rule(i=st.integers(0), arrives=st.booleans(), every=st.integers(1, 5))
    def end_loan(self, i: int, arrives: bool, every: int) -> None:
        batch = self.lent.pop(i % len(self.lent))
        if arrives:
            confirm(self.buf.core, batch)
            self.receive(batch)
        else:
            reclaim(self.buf.core, batch, {s.ticket_id for s in batch.samples if s.ticket_id % every == 0})
            assert not self.buf.core.resting, "what is lost must be made"
        before = self.buf.state_dict()
        reclaim(self.buf.core, batch)
        confirm(self.buf.core, batch)
        assert self.buf.state_dict() == before, "a loan ends once"

    @rule(every=st.integers(2, 5))
    def lose_payloads(self, every: int) -> None:
        buffered = {s.ticket_id for group in self.buf.core.groups.values() for s in group.done}
        lost = {ticket_id for ticket_id in buffered if ticket_id % every == 0}
        failed = self.buf.ledger.failed
        drop(self.buf.core, lost)
        assert self.buf.ledger.failed >= failed + len(lost)
        self.collect()

    @rule(partial=st.booleans())
    def wait_for_batch(self, partial: bool) -> None:
        if self.consumer is None:
            self.consumer = self.loop.create_task(self.buf.get_batch(partial=partial))

    @rule()
    def cancel_consumer(self) -> None:
        if self.consumer:
            self.consumer.cancel()

    @rule(closes=st.booleans())
    def save_and_restore(self, closes: bool) -> None:
        """A process dies (perhaps after closing) and another goes on; whatever ran is issued again."""
        core = self.buf.core
        state = self.buf.state_dict()
        cut = self.version - self.buf.stats().max_staleness
        stale = [group for group in core.lent.values() if min(s.start_version for s in group.done) < cut]
        kept = [group for group in core.lent.values() if group not in stale]
        alive = {g.id: [s.ticket_id for s in g.done] for g in [*core.groups.values(), *kept]}
        waiting = [Task(group.key, group.lost) for group in stale] + list(core.tasks.waiting)
        ledger, in_lent = self.buf.ledger, self.sizes["group_size"] * len(kept)
        self.lent.clear()
        self.buf.close()
        if closes:
            assert self.buf.state_dict() == state
        self.closed = True
        self.turn(4)
        self.collect()
        assert self.consumer is None and not any(self.producers) and not self.held
        self.ended.clear()
        wire = msgspec.msgpack.decode(msgspec.msgpack.encode(state))
        self.buf = SampleBuffer.restore(wire, self.keys(), keep=self.judge if self.keep else None)
        self.closed = False
        after = self.buf.ledger
        assert (after.running, after.buffered, after.issued) == (0, ledger.buffered + in_lent, ledger.issued)
        assert after.cancelled == ledger.cancelled + ledger.running
        assert {g.id: [s.ticket_id for s in g.done] for g in self.buf.core.groups.values()} == alive
        assert list(self.buf.core.tasks.waiting) == waiting

    # What must hold.

    @invariant()
    def the_ledger_balances(self) -> None:
        ledger, core = self.buf.ledger, self.buf.core
        assert ledger.balanced
        assert ledger.running == sum(len(group.running) for group in core.groups.values())
        assert ledger.buffered == sum(len(group.done) for group in core.groups.values())
        assert ledger.delivered == sum(len(group.samples) for group in self.handed_out())
        running = {ticket.id for group in core.groups.values() for ticket in group.running.values()}
        assert {ticket.id for ticket in self.held} <= running

    @invariant()
    def the_bound_holds(self) -> None:
        limit = self.version - self.buf.stats().max_staleness
        for group in self.buf.core.groups.values():
            assert all(ticket.bound >= limit for ticket in group.running.values())
            assert all(sample.start_version >= limit for sample in group.done)
        off = self.buf.stats().off_policy
        assert max(off.in_flight.max, off.in_queue.max) <= self.buf.stats().max_staleness

    @invariant()
    def the_capacity_holds(self) -> None:
        core = self.buf.core
        assert len(core.groups) + sum(len(batch.groups) for batch in self.lent) == core.alive <= core.limits.capacity
        for group in core.groups.values():
            assert len(group.running) + len(group.done) <= core.limits.launch
            assert len(group.done) <= core.limits.group_size
            assert (group.whole is not None) == (len(group.done) == core.limits.group_size)
            assert group.whole is None or not group.running
            assert group.queued == (group.id in core.wanting)
            assert group.queued or group.whole or group.alive == core.limits.launch
            assert group.lost <= core.limits.max_replacements
        assert sorted(i for _, i in core.shelf._ready) == sorted(g.id for g in core.groups.values() if g.whole)

    @invariant()
    def what_is_at_stake_is_what_the_next_version_would_take(self) -> None:
        core = self.buf.core
        cut = core.limits.oldest(core.version + 1)
        old = [group for group in core.groups.values() if any(group.stale(cut)[0]) or any(group.stale(cut)[1])]
        complete = sum(group.whole is not None for group in old)
        fits = max(0, core.limits.batch_groups - complete)
        assert core.at_stake == min(len(old) - complete, fits)

    @invariant()
    def every_key_is_somewhere_once(self) -> None:
        core = self.buf.core
        here = [group.key for group in core.groups.values()] + [task.key for task in core.tasks.waiting]
        gone = [group.key for group in self.handed_out()] + self.filtered + [g.key for g in core.given_up]
        assert Counter(here + gone) == Counter(range(core.tasks.drawn))

    @invariant()
    def nothing_is_delivered_twice(self) -> None:
        ids = [sample.ticket_id for group in self.handed_out() for sample in group.samples]
        assert len(ids) == len(set(ids))

    @invariant()
    def each_cancelled_ticket_was_told_once(self) -> None:
        for ticket in self.ended:
            told = [ticket.state] if ticket.state in ("surplus", "stale", "failed", "closed") else []
            assert self.reasons[ticket.id] == told
        for ticket in self.held:
            assert self.reasons[ticket.id] == []

    @invariant()
    def nobody_waits_for_what_is_there(self) -> None:
        """No lost wakeup: whoever still waits could be given nothing."""
        core = self.buf.core
        room = core.alive < core.limits.capacity and not core.tasks.over
        wanting = any(g.whole is None and g.alive < core.limits.launch for g in core.groups.values())
        if any(not waiter.done() for waiter in self.buf._ticket_waiters):
            assert core.resting or not (room or wanting)
            assert not core.closed
        if any(not waiter.done() for waiter in self.buf._batch_waiters):
            assert len(core.shelf) < core.limits.batch_groups and not core.closed


BufferMachine.TestCase.settings = settings(
    max_examples=200,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestBuffer = BufferMachine.TestCase
