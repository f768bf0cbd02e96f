"""The ledger against a model: counts balance, loads add up, ends are final."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llmproxy import DuplicateRequest, GenerateRequest, Partial, SimWorker, WrongState
from llmproxy.fleet import Slot
from llmproxy.ledger import End, Entry, Ledger


class NoTask:
    def cancelling(self) -> int:
        return 0


TASK = cast("asyncio.Task[Any]", NoTask())


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.slots = [Slot(SimWorker(f"w{i}")) for i in range(2)]
        self.live: list[Entry] = []
        self.ended: list[Entry] = []
        self.charges: dict[Entry, tuple[Slot, int]] = {}
        self.admitted = 0

    @rule(trajectory=st.integers(0, 3), prompt=st.integers(1, 9))
    def admit(self, trajectory: int, prompt: int) -> None:
        request = GenerateRequest(f"t{trajectory}", [1] * prompt, 5, request_id=f"r{self.admitted}")
        if any(entry.request.trajectory_id == request.trajectory_id for entry in self.live):
            with pytest.raises(DuplicateRequest):
                self.ledger.admit(request, 0.0, TASK)
            return
        self.live.append(self.ledger.admit(request, 0.0, TASK))
        self.admitted += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data(), slot=st.integers(0, 1))
    def dispatch(self, data: st.DataObject, slot: int) -> None:
        entry = data.draw(st.sampled_from(self.live))
        if entry in self.charges:
            with pytest.raises(WrongState):
                self.ledger.dispatch(entry, self.slots[slot], 0.0)
            return
        self.ledger.dispatch(entry, self.slots[slot], 0.0)
        self.charges[entry] = (self.slots[slot], entry.request.tokens)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), made=st.integers(0, 2))
    def requeue(self, data: st.DataObject, made: int) -> None:
        entry = data.draw(st.sampled_from(self.live))
        partial = Partial([1] * made, [0.0] * made, [], 5 - made)
        if entry not in self.charges:
            with pytest.raises(WrongState):
                self.ledger.requeue(entry, partial, 0.0)
            return
        self.ledger.requeue(entry, partial, 0.0)
        del self.charges[entry]
        assert entry.partial == partial

    @precondition(lambda self: self.live)
    @rule(data=st.data(), state=st.sampled_from(["finished", "aborted", "failed"]))
    def end(self, data: st.DataObject, state: End) -> None:
        entry = data.draw(st.sampled_from(self.live))
        self.ledger.end(entry, state, 0.0)
        self.live.remove(entry)
        self.ended.append(entry)
        self.charges.pop(entry, None)

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def end_again(self, data: st.DataObject) -> None:
        with pytest.raises(WrongState):
            self.ledger.end(data.draw(st.sampled_from(self.ended)), "finished", 0.0)

    @invariant()
    def balances(self) -> None:
        counts = self.ledger.counts
        fates = ("queued", "dispatched", "finished", "aborted", "failed")
        assert counts["admitted"] == self.admitted == sum(counts[fate] for fate in fates)
        assert counts["queued"] + counts["dispatched"] == len(self.ledger) == len(self.live)
        for slot in self.slots:
            here = [charge for holder, charge in self.charges.values() if holder is slot]
            assert (slot.charged, slot.running) == (sum(here), len(here))
        for entry in self.live:
            assert (
                self.ledger.find(entry.request.trajectory_id) is self.ledger.find(entry.request.request_id) is entry
            )


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_releasing_more_than_was_charged_is_an_error() -> None:
    slot = Slot(SimWorker("w"))
    slot.charge(10)
    with pytest.raises(WrongState, match="released 11"):
        slot.release(11)
