"""The parts of rollart.distributed that need no Ray: marks, shares, seats, carried exceptions."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.distributed import Cluster, Layout, NotRunning, Worker, affinity_of, hw_mapping, register
from rollart.distributed.carry import carried
from rollart.distributed.decorators import Marks, Serverless, marked_methods, register_serverless
from rollart.distributed.dispatch import dp_dispatch, shard, tag_of
from rollart.distributed.placement import Seat, default_requests, fallbacks, seats


class Gen(Worker):
    @hw_mapping(hw_affinity={"FrozenLake": "H800", "default": "H20"})
    def generate(self, request: dict[str, str]) -> str:
        return "token"

    @register("execute_all", idempotent=True)
    @register_serverless("judge", "https://judge.example/score")
    def reward(self) -> None: ...

    def helper(self) -> None: ...


def test_decorators_mark_and_leave_the_function_as_it_is() -> None:
    assert Gen().generate({}) == "token"
    assert affinity_of(Gen.generate) == {"FrozenLake": "H800", "default": "H20"}
    serverless = Serverless("judge", "https://judge.example/score")
    assert marked_methods(Gen)["reward"] == Marks("execute_all", serverless=serverless, idempotent=True)
    assert sorted(marked_methods(Gen)) == ["generate", "reward"]


@pytest.mark.parametrize(
    ("mistake", "remedy"),
    [
        (lambda: register("all"), "mode='all' must be one of execute_all"),  # type: ignore[arg-type]
        (lambda: hw_mapping({}), "must map at least one tag"),
        (lambda: register_serverless("not a name", "https://x"), "must be the name of an attribute"),
        (lambda: register_serverless("judge", "file:///x"), "must begin with http"),
        (lambda: affinity_of(Gen.helper), "Gen.helper is not decorated with hw_mapping"),
        (lambda: Cluster(Gen, size=0), "size=0 must be a whole number, at least 1"),
        (lambda: Cluster(type("Bad", (Worker,), {"stop": Gen.generate})), "Bad.stop has the name"),
    ],
)
def test_mistakes_say_what_to_do(mistake: Any, remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        mistake()


def test_a_cluster_that_has_not_started_says_so() -> None:
    cluster = Cluster(Gen)
    assert cluster.role == "gen"
    for use in (cluster.reward, lambda: cluster.died):
        with pytest.raises(NotRunning):
            use()


@given(items=st.lists(st.integers(), max_size=30), dp=st.integers(1, 5), tp=st.integers(1, 3))
def test_shares_are_joined_in_order(items: list[int], dp: int, tp: int) -> None:
    """Whatever the parallel layout, each item is handled once, and the joined results are in order."""
    layouts = [Layout(rank // tp, dp, collects=rank % tp == tp - 1) for rank in range(dp * tp)]
    plan = dp_dispatch(layouts, ((items, "whole"), {"named": items}))
    shares = [args[0] for _, (args, _) in plan.calls]
    assert all(abs(len(a) - len(b)) <= 1 for a in shares for b in shares)
    assert all(args[1] == "whole" and named["named"] == args[0] for _, (args, named) in plan.calls)
    assert plan.join([[2 * x for x in args[0]] for _, (args, _) in plan.calls]) == [2 * x for x in items]
    assert plan.join([rank for rank, _ in plan.calls]) == [rank for rank in range(dp * tp) if rank % tp == tp - 1]


def test_values_may_say_how_they_are_split() -> None:
    class Batch:
        def shard(self, rank: int, size: int) -> str:
            return f"{rank} of {size}"

    assert shard(Batch(), 1, 4) == "1 of 4"


def test_tags() -> None:
    class Asked:
        task = "math"

    assert [tag_of(r) for r in ({"tag_name": "a", "task": "b"}, Asked(), {}, None, 3)] == [
        "a",
        "math",
        "default",
        "default",
        "default",
    ]


class Allocation:
    def __init__(self, pool: str, node: str, amount: float) -> None:
        self.pool, self.node, self.amount = pool, node, amount


class Binding:
    def __init__(self, id: str, hardware: str, *allocations: Allocation, fell_back: bool = False) -> None:
        self.id, self.hardware, self.fell_back, self.allocations = id, hardware, fell_back, allocations
        self.amount = sum(a.amount for a in allocations)


def test_seats_follow_amounts_and_nodes() -> None:
    big = Binding("b1", "H800", Allocation("p", "n1", 8), Allocation("p", "n2", 8))
    small = Binding("b2", "H20", Allocation("q", "", 8), fell_back=True)
    assert seats([big, small], 3) == [
        Seat("H800", "n1", "b1"),
        Seat("H800", "n2", "b1"),
        Seat("H20", "q", "b2", True),
    ]
    assert seats([], 2) == [Seat(), Seat()]
    with pytest.raises(ValueError, match=r"size=4 workers do not divide over the granted amounts \[16, 8\]"):
        seats([big, small], 4)


class Asked:
    def __init__(self, prefer: list[str], fallback: list[str]) -> None:
        self.prefer, self.fallback = prefer, fallback


def test_fallbacks_are_those_of_the_requests() -> None:
    requests = [Asked(["H800", "H20"], ["cpu"]), Asked(["H20"], ["H800"])]
    assert fallbacks(requests) == {"H800": ["H20", "cpu"], "H20": ["H800", "cpu"]}


class Resources:
    async def status(self) -> Any:
        class Status:
            pools = (Pool("H800"), Pool("H20"), Pool("H800"))

        return Status()


class Pool:
    def __init__(self, hardware: str) -> None:
        self.hardware = hardware


async def test_default_requests_come_from_affinity_or_pools() -> None:
    resources: Any = Resources()
    both = await default_requests(resources, Gen, "gen", 3)
    assert [(r.prefer, r.fallback, r.amount, r.gang) for r in both] == [
        (["H800"], ["H20"], 1, True),
        (["H20"], ["H800"], 2, True),
    ]
    (one,) = await default_requests(resources, Worker, "train", 4)
    assert (one.role, one.prefer, one.amount) == ("train", ["H800", "H20"], 4)


class Computed(Exception):
    def __init__(self, code: int, *, where: str) -> None:
        super().__init__(f"code {code} at {where}")
        self.code = code


def test_exceptions_are_carried_whatever_their_constructor() -> None:
    pytest.importorskip("ray")
    sent = carried(Computed(7, where="here"))
    original = sent.original()
    assert type(original) is Computed and (original.code, str(original)) == (7, "code 7 at here")
    assert sent.line.endswith("Computed: code 7 at here")


def test_an_exception_that_holds_a_lock_is_told_of() -> None:
    pytest.importorskip("ray")
    error = ValueError("locked")
    error.lock = asyncio.Lock().__aenter__()  # type: ignore[attr-defined]
    sent = carried(error)
    error.lock.close()  # type: ignore[attr-defined]
    assert sent.original() is None and sent.line == "ValueError: locked"
