"""What is refused before anything is sent, and that amounts are exact."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import resmgr
from resmgr import Invalid, Node, Pool, Request, wire
from resmgr.amounts import to_milli, to_units


@pytest.mark.parametrize("amount", [0, -1, math.nan, math.inf, 0.0001, 1.00005, 2e9, "3", None])
def test_amounts_that_mean_nothing_are_refused(amount):
    with pytest.raises(Invalid, match="amount"):
        Request("x", prefer=["cpu"], amount=amount).validate()
    with pytest.raises(Invalid, match="total"):
        Pool("x", hardware="cpu", nodes=[Node("n", amount)]).validate()


@given(st.integers(1, 10**12))
def test_every_amount_survives_the_way_to_the_store(milli):
    assert to_milli("x", to_units(milli)) == milli


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prefer": []}, "must name a class"),
        ({"prefer": ["H800"], "fallback": ["H800"]}, "none of them twice"),
        ({"prefer": "H800"}, "must be a list of names"),
        ({"role": "a b"}, "Request.role='a b' must be"),
        ({"min_amount": 9}, "at most amount=8"),
        ({"min_amount": 4, "gang": True}, "left out of a gang"),
        ({"chunk": 3}, "multiple of chunk=3"),
        ({"amount": 3, "chunk": 1.5}, "whole units, or a fraction"),
        ({"amount": 1.5, "spread": True}, "whole number to be spread"),
        ({"priority": 5000}, "within -1000..1000"),
        ({"priority": 0.5}, "whole number within -1000..1000"),
        ({"priority": "1"}, "whole number within -1000..1000"),
        ({"apart": ["x\n"]}, "Request.apart"),
        ({"labels": {"zone": 1}}, "strings to strings"),
        ({"labels": None}, "strings to strings"),
        ({"labels": {"zone": "\udcff"}}, "without surrogates"),
        ({"labels": {"zone": "x" * 200_000}}, "longer than"),
        ({"gang": "no"}, "gang='no' must be True or False"),
        ({"spread": None}, "spread=None must be True or False"),
        ({"fallback": [f"c{i}" for i in range(2000)]}, "has 2000 names; give at most 1000"),
        ({"amount": 1e6, "chunk": 0.5}, "2000000 fractions"),
        ({"amount": True}, "amount=True"),
    ],
)
def test_requests_that_contradict_themselves_are_refused(change, message):
    request = msgspec.structs.replace(Request("x", prefer=["H800"], amount=8), **change)
    with pytest.raises(Invalid, match=message):
        request.validate()


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (Pool("a/b", hardware="cpu", total=1), "Pool.name"),
        (Pool("a", hardware="", total=1), "Pool.hardware"),
        (Pool("a", hardware="cpu"), "must be positive, or give nodes"),
        (Pool("a", hardware="cpu", total=3, nodes=[Node("n", 2)]), "sum over its nodes, 2.0"),
        (Pool("a", hardware="cpu", nodes=[Node("n", 2), Node("n", 2)]), "different names"),
        (Pool("a", hardware="cpu", nodes=iter([Node("n", 2)])), "must be a list of Node"),  # type: ignore[arg-type]
        (Pool("a", hardware="cpu", nodes=[{"name": "n"}]), "must be a Node"),  # type: ignore[list-item]
        (Pool("a", hardware="cpu", nodes=None), "must be a list of Node"),  # type: ignore[arg-type]
        (Pool("a", hardware="cpu", total=True), "Pool.total=True"),
        (Pool("a", hardware="cpu", total=1, labels={"x": "\udcff"}), "without surrogates"),
    ],
)
def test_pools_that_contradict_themselves_are_refused(pool, message):
    with pytest.raises(Invalid, match=message):
        pool.validate()


def test_equal_pools_are_one_definition():
    whole = Pool("p", "H20", 2, nodes=[Node("a", 1), Node("b", 1)])
    real = Pool("p", "H20", 2.0, nodes=[Node("b", 1.0), Node("a", 1.0)])
    assert wire.pool_bytes(whole)[0] == wire.pool_bytes(real)[0]


def test_the_public_names_are_exported():
    assert all(hasattr(resmgr, name) for name in resmgr.__all__)
    assert resmgr.__all__ == sorted(resmgr.__all__)
