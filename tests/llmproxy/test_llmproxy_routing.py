"""Where requests go: by class, by own worker, by load, and spread."""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random

import pytest

from llmproxy import (
    AffinityRouter,
    Fleet,
    GenerateRequest,
    GenerateResult,
    LLMProxy,
    SimWorker,
    Slot,
    Span,
    Timing,
    less_loaded,
)


class Silent(SimWorker):
    """Does not report its backlog, so that it is judged by what it was charged."""

    backlog = None  # type: ignore[assignment]


def fleet_of(*workers: SimWorker, gone: tuple[str, ...] = ()) -> Fleet:
    fleet = Fleet()
    for worker in workers:
        fleet.add(worker)
    fleet.refresh(lambda id: id not in gone)
    return fleet


def request(id: str = "t", tokens: int = 100, task: str = "default") -> GenerateRequest:
    return GenerateRequest(id, [1] * tokens, 10, task=task)


def mixed(count: int = 2) -> list[SimWorker]:
    return [Silent(f"{hardware}-{i}", hardware=hardware) for hardware in ("H800", "H20") for i in range(count)]


def place(router: AffinityRouter, fleet: Fleet, asked: GenerateRequest) -> Slot:
    slot = router.choose(asked, fleet)
    assert slot is not None
    slot.charge(asked.tokens)
    return slot


@pytest.mark.parametrize(("task", "hardware"), [("FrozenLake", "H800"), ("math", "H20"), ("default", "H20")])
def test_the_task_decides_the_class(task: str, hardware: str) -> None:
    router = AffinityRouter({"FrozenLake": "H800", "default": "H20"})
    fleet = fleet_of(*mixed())
    assert {place(router, fleet, request(f"t{i}", task=task)).hardware for i in range(20)} == {hardware}
    assert not any(name.startswith("fallback") for name in router.stats())


def test_a_task_without_a_class_goes_anywhere() -> None:
    fleet = fleet_of(*mixed())
    assert {place(AffinityRouter({"other": "H800"}), fleet, request(f"t{i}")).hardware for i in range(40)} == {
        "H800",
        "H20",
    }


def test_falls_back_when_the_class_is_gone_and_counts_it() -> None:
    router = AffinityRouter({"FrozenLake": "H800"})
    fleet = fleet_of(*mixed(1), gone=("H800-0",))
    assert place(router, fleet, request(task="FrozenLake")).id == "H20-0"
    assert router.stats()["fallback/FrozenLake/H800/H20"] == 1


def test_tasks_that_callers_make_up_are_counted_together() -> None:
    router = AffinityRouter({"default": "H800"})
    fleet = fleet_of(*mixed(1), gone=("H800-0",))
    for n in range(100):
        place(router, fleet, request(f"t{n}", task=f"made-up-{n}"))
    assert {name: n for name, n in router.stats().items() if "/" in name} == {"fallback/default/H800/H20": 100}


def test_falls_back_only_where_it_may() -> None:
    fleet = fleet_of(*mixed(1), gone=("H800-0",))
    assert AffinityRouter({"default": "H800"}, fallback={}).choose(request(), fleet) is None
    listed = AffinityRouter({"default": "H800"}, fallback={"H800": ["H20"]})
    assert place(listed, fleet, request()).id == "H20-0"


def test_a_saturated_class_overflows_until_the_others_are_full_too() -> None:
    router = AffinityRouter({"default": "H800"}, saturation=250)
    fleet = fleet_of(*mixed(1))
    went = [place(router, fleet, request(f"t{i}")).hardware for i in range(7)]
    assert went == ["H800"] * 3 + ["H20"] * 3 + ["H800"]
    assert router.stats()["fallback/default/H800/H20"] == 3


def test_later_turns_stay_until_waiting_costs_more_than_a_new_prefill() -> None:
    router = AffinityRouter(slack=1_000)
    fleet = fleet_of(Silent("a"), Silent("b"))
    own, other = (slot for slot in fleet)
    router.served(request("t"), own)
    own.charge(1_000)
    assert all(router.choose(request("t"), fleet) is own for _ in range(20))
    own.charge(1)
    assert any(router.choose(request("t"), fleet) is other for _ in range(20))


def test_an_update_makes_trajectories_free_to_move() -> None:
    router = AffinityRouter()
    fleet = fleet_of(Silent("a"), Silent("b"))
    own, other = (slot for slot in fleet)
    router.served(request("t"), own)
    own.charge(500)
    assert all(router.choose(request("t"), fleet) is own for _ in range(20))
    router.flushed()
    assert any(router.choose(request("t"), fleet) is other for _ in range(20))


def test_a_trajectory_whose_worker_is_fenced_goes_elsewhere() -> None:
    router = AffinityRouter()
    fleet = fleet_of(Silent("a"), Silent("b"))
    own, other = (slot for slot in fleet)
    router.served(request("t"), own)
    fleet.refresh(lambda id: id != own.id)
    assert router.choose(request("t"), fleet) is other


def test_what_is_remembered_is_bounded() -> None:
    router = AffinityRouter(remember=10)
    fleet = fleet_of(Silent("a"))
    (slot,) = fleet
    for i in range(100):
        router.served(request(f"t{i}"), slot)
    assert router.stats()["homes"] == 10


def test_only_workers_that_take_the_context_are_chosen() -> None:
    fleet = fleet_of(Silent("short", context_limit=200), Silent("long", context_limit=2_000))
    went = {
        tokens: {place(AffinityRouter(), fleet, request(f"t{i}", tokens)).id for i in range(30)}
        for tokens in (50, 500)
    }
    assert went == {50: {"short", "long"}, 500: {"long"}}


def test_ties_are_equally_likely() -> None:
    fleet = fleet_of(*(Silent(f"w{i}") for i in range(8)))
    random = Random(1)
    slots = list(fleet)
    counts = Counter(less_loaded(slots, random).id for _ in range(8_000))
    assert len(counts) == 8 and max(counts.values()) < 1_150 and min(counts.values()) > 850


@pytest.mark.parametrize("seed", range(5))
def test_a_burst_of_first_turns_spreads(seed: int) -> None:
    """64 members of a few groups, all at once: near 8 on each of 8 workers."""
    router = AffinityRouter(random=Random(seed))
    fleet = fleet_of(*(Silent(f"w{i}") for i in range(8)))
    for i in range(64):
        place(router, fleet, request(f"t{i}", 200))
    assert all(5 <= slot.running <= 11 for slot in fleet)


@pytest.mark.parametrize("seed", range(5))
async def test_prompts_of_equal_length_do_not_land_on_one_worker(seed: int) -> None:
    """The whole proxy, one after the other, each finished before the next: every load is 0 and all tie."""
    workers = [SimWorker(f"w{i}") for i in range(4)]
    proxy = LLMProxy(workers, router=AffinityRouter(random=Random(seed)))
    went = Counter([(await proxy.generate(GenerateRequest(f"t{i}", [i + 1] * 50, 1))).worker for i in range(40)])
    assert len(went) == 4 and max(went.values()) <= 20


async def test_a_long_queue_is_avoided_even_by_few_requests() -> None:
    """Load is tokens, not requests: one long prompt outweighs several short ones."""
    workers = [SimWorker("a", prefill_rate=1.0), SimWorker("b", prefill_rate=1.0)]
    proxy = LLMProxy(workers, router=AffinityRouter(random=Random(0)))
    tasks = [asyncio.create_task(proxy.generate(GenerateRequest("long", [1] * 50_000, 1)))]
    await asyncio.sleep(0)
    busy = next(stats.id for stats in proxy.stats().workers if stats.running)
    tasks += [asyncio.create_task(proxy.generate(GenerateRequest(f"t{i}", [1] * 50, 1))) for i in range(12)]
    await asyncio.sleep(0)
    running = {stats.id: stats.running for stats in proxy.stats().workers}
    # Two random looks find the busy worker alone with probability 1/4 each.
    assert running.pop(busy) <= 7 and sum(running.values()) >= 6
    await proxy.close()
    await asyncio.gather(*tasks, return_exceptions=True)


def later_turn(router: AffinityRouter, slot: Slot, name: str, cached: int) -> None:
    result = GenerateResult([2] * 10, [0.0] * 10, [Span(0, 0, 10)], "stop", slot.id, Timing(cached_tokens=cached))
    router.served(GenerateRequest(name, [1] * 100, 10), slot, result)
    router.served(GenerateRequest(name, [1] * 100 + [2] * 10, 10), slot, result)


def test_a_worker_that_loses_prefixes_is_full_until_it_finds_them_again() -> None:
    router = AffinityRouter({"default": "H800"}, random=Random(0))
    fleet = fleet_of(*mixed(1))
    crowded, other = (slot for slot in fleet)
    later_turn(router, crowded, "well", cached=90)
    for i in range(5):
        later_turn(router, crowded, f"t{i}", cached=0)
    assert router.choose(request("new"), fleet) is other  # another class rather than one more
    assert router.choose(request("t0"), fleet) is other  # nothing of it is left there
    assert router.choose(request("well"), fleet) is crowded
    for i in range(30):
        later_turn(router, crowded, f"u{i}", cached=90)
    assert router.choose(request("new"), fleet) is crowded
    assert router.stats()["lost"] == 5 and router.stats()["fallback/default/H800/H20"] == 2


def test_a_worker_that_never_tells_what_it_found_is_not_judged() -> None:
    router = AffinityRouter(random=Random(0))
    fleet = fleet_of(Silent("a"), Silent("b"))
    slot = next(iter(fleet))
    for i in range(20):
        later_turn(router, slot, f"t{i}", cached=0)
    assert all(router.choose(request(f"t{i}"), fleet) is slot for i in range(20))


def test_a_trajectory_that_fell_back_stays_where_its_prefix_is() -> None:
    router = AffinityRouter({"default": "H800"}, random=Random(0))
    fleet = fleet_of(*mixed(1), gone=("H800-0",))
    slot = place(router, fleet, request())
    router.served(request(), slot)
    fleet.refresh(lambda _: True)
    assert router.choose(request(), fleet) is slot and router.choose(request("new"), fleet) is not slot
