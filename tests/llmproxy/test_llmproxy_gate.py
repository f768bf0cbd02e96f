"""The gate's two promises: nothing while suspended, nobody without proof."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmproxy import WrongState
from llmproxy.gate import Gate

MOVES = st.one_of(
    st.tuples(st.just("prove"), st.sampled_from("ab"), st.integers(0, 3) | st.none()),
    st.tuples(st.just("fence"), st.sampled_from("ab"), st.none()),
    st.tuples(st.just("forget"), st.sampled_from("ab"), st.none()),
    st.tuples(st.just("allow"), st.just(""), st.integers(0, 3)),
)


@settings(deadline=None)
@given(st.lists(MOVES))
def test_a_worker_serves_only_by_its_last_proof(moves: list[tuple[str, str, int | None]]) -> None:
    gate = Gate(0)
    gate.suspend()
    last: dict[str, int | None] = {}
    allowed = 0
    for move, worker, version in moves:
        if move == "prove":
            last[worker] = version
            assert gate.prove(worker, version) == (version == allowed)
        elif move == "allow":
            assert version is not None
            gate.allow(version)
            allowed = version
        else:
            last.pop(worker, None)
            gate.fence(worker, "failed") if move == "fence" else gate.forget(worker)
        for known in "ab":
            serves = last.get(known) == allowed and known in last
            assert gate.serves(known) == serves
            assert bool(gate.reason(known)) == (not serves)


def test_the_version_changes_only_while_suspended() -> None:
    gate = Gate(3)
    with pytest.raises(WrongState, match="suspend first"):
        gate.allow(4)
    gate.suspend()
    gate.allow(4)
    gate.resume()
    assert gate.version == 4 and not gate.suspended


def test_a_refused_update_keeps_the_gate_shut_until_one_succeeds() -> None:
    gate = Gate(3)
    gate.suspend()
    gate.refuse()
    with pytest.raises(WrongState, match="update again"):
        gate.resume()
    assert gate.suspended
    gate.allow(4)
    gate.resume()
    assert not gate.suspended
