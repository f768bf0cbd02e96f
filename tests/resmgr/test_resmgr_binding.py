"""Where requests land, what they take, and what they are refused."""

import pytest

from resmgr import (
    BindTimeout,
    Infeasible,
    Invalid,
    Node,
    Pool,
    PoolMismatch,
    Request,
    ResourceManager,
    StaleBinding,
    UnknownHardware,
)

pytestmark = pytest.mark.real


@pytest.fixture
async def rm(place) -> ResourceManager:
    return await place.connect()


async def free(rm: ResourceManager) -> dict[str, float]:
    return {pool.name: pool.free for pool in (await rm.status()).pools}


async def test_a_request_lands_on_the_first_preferred_class_with_room(rm):
    await rm.register(Pool("a", hardware="H800", total=4))
    await rm.register(Pool("b", hardware="H100", total=4))
    request = Request("gen", prefer=["H800", "H100"], amount=3)
    first, second = await rm.bind(request, timeout=0), await rm.bind(request, timeout=0)
    assert (first.hardware, second.hardware) == ("H800", "H100")
    assert not first.fell_back and not second.fell_back
    assert second.token > first.token
    assert await free(rm) == {"a": 1, "b": 1}


async def test_fallback_is_taken_at_once_and_recorded(rm):
    await rm.register(Pool("a", hardware="H800", total=4))
    await rm.register(Pool("b", hardware="H20", total=8))
    request = Request("gen", prefer=["H800"], fallback=["H20"], amount=4, gang=True)
    await rm.bind(request, timeout=0)
    fallen = await rm.bind(request, timeout=0)
    assert (fallen.hardware, fallen.fell_back, fallen.amount) == ("H20", True, 4)


async def test_a_gang_is_never_spread_over_two_classes(rm):
    await rm.register(Pool("a", hardware="H800", total=4))
    await rm.register(Pool("b", hardware="H20", total=4))
    await rm.bind(Request("x", prefer=["H800"], amount=2), timeout=0)
    await rm.bind(Request("x", prefer=["H20"], amount=2), timeout=0)
    with pytest.raises(BindTimeout):
        await rm.bind(Request("gen", prefer=["H800"], fallback=["H20"], amount=4, gang=True), timeout=0)
    assert await free(rm) == {"a": 2, "b": 2}


async def test_an_amount_goes_to_the_tightest_pool_that_holds_it_and_spans_pools_otherwise(rm):
    await rm.register(Pool("big", hardware="H800", total=8))
    await rm.register(Pool("small", hardware="H800", total=3))
    tight = await rm.bind(Request("x", prefer=["H800"], amount=3), timeout=0)
    assert [a.pool for a in tight.allocations] == ["small"]
    await rm.release(tight)
    wide = await rm.bind(Request("x", prefer=["H800"], amount=10), timeout=0)
    assert {a.pool: a.amount for a in wide.allocations} == {"big": 8, "small": 2}


async def test_a_partial_grant_takes_what_there_is_above_its_minimum(rm):
    await rm.register(Pool("a", hardware="H800", total=8))
    await rm.bind(Request("x", prefer=["H800"], amount=3), timeout=0)
    part = await rm.bind(Request("y", prefer=["H800"], amount=8, min_amount=4), timeout=0)
    assert part.amount == 5


async def test_a_fraction_lies_within_one_unit(rm):
    await rm.register(Pool("a", hardware="H800", total=2))
    for _ in range(2):
        await rm.bind(Request("x", prefer=["H800"], amount=0.6), timeout=0)
    assert await free(rm) == {"a": 0.8}
    with pytest.raises(BindTimeout):
        await rm.bind(Request("x", prefer=["H800"], amount=0.6), timeout=0)
    small = await rm.bind(Request("x", prefer=["H800"], amount=0.4), timeout=0)
    assert small.allocations[0].slot


async def test_shared_units_become_whole_again(rm):
    await rm.register(Pool("cpu", hardware="cpu", total=1.5))
    halves = [await rm.bind(Request("x", prefer=["cpu"], amount=0.5), timeout=0) for _ in range(3)]
    assert await free(rm) == {"cpu": 0}
    for half in halves:
        await rm.release(half)
    assert (await rm.bind(Request("x", prefer=["cpu"], amount=1.5), timeout=0)).amount == 1.5


async def test_chunks_stay_on_one_node(rm):
    nodes = [Node("n1", 6), Node("n2", 5), Node("n3", 3)]
    await rm.register(Pool("a", hardware="H800", nodes=nodes))
    binding = await rm.bind(Request("tp4", prefer=["H800"], amount=8, chunk=4), timeout=0)
    assert {a.node: a.amount for a in binding.allocations} == {"n1": 4, "n2": 4}
    with pytest.raises(Infeasible, match="8 would fit"):
        await rm.bind(Request("tp4", prefer=["H800"], amount=12, chunk=4))


async def test_spread_chunks_have_nodes_of_their_own_also_when_they_grow(rm):
    nodes = [Node(f"n{i}", 8) for i in range(3)]
    await rm.register(Pool("a", hardware="H800", nodes=nodes))
    binding = await rm.bind(Request("x", prefer=["H800"], amount=2, spread=True), timeout=0)
    assert len(binding.nodes) == 2
    grown = await rm.reconfigure(binding, 3, timeout=0)
    assert sorted(grown.nodes) == ["n0", "n1", "n2"]
    with pytest.raises(Infeasible):
        await rm.bind(Request("x", prefer=["H800"], amount=4, spread=True))


async def test_spread_fractions_have_nodes_of_their_own(rm):
    await rm.register(Pool("a", hardware="cpu", nodes=[Node("n0", 1), Node("n1", 1)]))
    binding = await rm.bind(Request("x", prefer=["cpu"], amount=0.4, chunk=0.2, spread=True), timeout=0)
    assert len(binding.nodes) == 2


async def test_anti_affinity_holds_in_both_directions(rm):
    await rm.register(Pool("a", hardware="H800", nodes=[Node("n0", 8), Node("n1", 8)]))
    shy = await rm.bind(Request("shy", prefer=["H800"], apart=["noisy", "shy"]), timeout=0)
    noisy = await rm.bind(Request("noisy", prefer=["H800"], amount=8), timeout=0)
    assert shy.nodes != noisy.nodes
    with pytest.raises(BindTimeout):
        await rm.bind(Request("shy", prefer=["H800"], apart=["noisy", "shy"]), timeout=0)
    await rm.release(noisy)
    other = await rm.bind(Request("shy", prefer=["H800"], apart=["noisy", "shy"]), timeout=0)
    assert other.nodes != shy.nodes
    await rm.release(shy)
    await rm.bind(Request("noisy", prefer=["H800"], amount=8), timeout=0)


async def test_labels_choose_the_node(rm):
    nodes = [Node("n0", 8, labels={"zone": "x"}), Node("n1", 4)]
    await rm.register(Pool("a", hardware="H800", nodes=nodes, labels={"zone": "y", "link": "ib"}))
    binding = await rm.bind(Request("x", prefer=["H800"], labels={"zone": "x", "link": "ib"}), timeout=0)
    assert binding.nodes == ("n0",)
    with pytest.raises(Infeasible, match=r"H800: 4 would fit \(of 4 that match"):
        await rm.bind(Request("x", prefer=["H800"], amount=5, labels={"zone": "y"}))


async def test_infeasible_says_at_once_what_would_fit(rm):
    await rm.register(Pool("a", hardware="H800", total=96))
    await rm.register(Pool("b", hardware="H20", total=32))
    await rm.bind(Request("x", prefer=["H800"], amount=96), timeout=0)
    with pytest.raises(Infeasible, match=r"H800: 96 would fit .* H20: 32 would fit"):
        await rm.bind(Request("gen", prefer=["H800"], fallback=["H20"], amount=100))


async def test_an_unknown_class_is_refused_even_where_another_has_room(rm):
    await rm.register(Pool("a", hardware="H800", total=8))
    with pytest.raises(UnknownHardware, match=r"'H8OO'; known are H800"):
        await rm.bind(Request("gen", prefer=["H8OO"], fallback=["H800"]))
    assert (await rm.status()).bindings == ()


async def test_a_pool_is_registered_once_and_replaced_only_on_demand(rm):
    await rm.register(Pool("a", hardware="H800", total=8, labels={"x": "1", "y": "2"}))
    await rm.register(Pool("a", hardware="H800", total=8, labels={"y": "2", "x": "1"}))
    with pytest.raises(PoolMismatch, match="replace=True"):
        await rm.register(Pool("a", hardware="H800", total=9))
    await rm.register(Pool("a", hardware="H800", total=9), replace=True)
    assert await free(rm) == {"a": 9}


async def test_a_mismatch_names_what_differs_and_nothing_else(rm):
    nodes = [Node(f"n{i}", 8, {"zone": "x"}) for i in range(50)]
    await rm.register(Pool("a", hardware="H800", nodes=nodes))
    fewer = [Node("n0", 4), *nodes[2:], Node("extra", 8)]
    with pytest.raises(PoolMismatch) as caught:
        await rm.register(Pool("a", hardware="H20", nodes=fewer))
    assert str(caught.value) == (
        "pool 'a' is registered with hardware='H800', not 'H20'; node 'n0': total=8.0, not 4; "
        "node 'n0': labels={'zone': 'x'}, not {}; a node 'n1', which is missing now; no node 'extra'; "
        "use another name, or register(pool, replace=True)"
    )
    with pytest.raises(PoolMismatch, match=r"which is missing now; and 41 more; use another name"):
        await rm.register(Pool("a", hardware="H800", total=1))


async def test_what_was_released_cannot_be_used(rm):
    await rm.register(Pool("a", hardware="H800", total=8))
    binding = await rm.bind(Request("x", prefer=["H800"], amount=8), timeout=0)
    await rm.release(binding)
    for use in (rm.release, rm.check, rm.move_back, rm.hold):
        with pytest.raises(StaleBinding, match="was released or lost"):
            await use(binding)
    with pytest.raises(StaleBinding):
        await rm.reconfigure(binding, 2)
    with pytest.raises(StaleBinding):
        await rm.annotate(binding, {"address": "x"})
    assert await free(rm) == {"a": 8}


async def test_what_is_no_binding_is_refused(rm):
    for change in (rm.release, rm.move_back, lambda binding: rm.reconfigure(binding, 2)):
        with pytest.raises(Invalid, match="give a Binding, as bind returns it, not 'x'"):
            await change("x")


async def test_growth_beyond_all_that_the_class_has_is_refused_at_once(rm):
    await rm.register(Pool("a", hardware="H20", total=8))
    await rm.register(Pool("b", hardware="H800", total=16))
    binding = await rm.bind(Request("gen", prefer=["H20"], fallback=["H800"], amount=4))
    other = await rm.bind(Request("other", prefer=["H20"], amount=4))
    with pytest.raises(Infeasible, match="9 for 'gen' can never be granted: H20: 8 would fit"):
        await rm.reconfigure(binding, 9)
    with pytest.raises(BindTimeout):
        await rm.reconfigure(binding, 8, timeout=0)
    await rm.release(other)
    assert (await rm.reconfigure(binding, 8)).amount == 8


async def test_reconfigure_shrinks_at_once_and_grows_on_the_same_class_under_the_same_token(rm):
    await rm.register(Pool("a", hardware="H800", total=8))
    binding = await rm.bind(Request("x", prefer=["H800"], amount=6), timeout=0)
    small = await rm.reconfigure(binding, 2.5)
    assert (small.amount, small.token, await free(rm)) == (2.5, binding.token, {"a": 5.5})
    large = await rm.reconfigure(small, 8, timeout=0)
    assert (large.amount, await free(rm)) == (8, {"a": 0})
    with pytest.raises(Infeasible):
        await rm.reconfigure(large, 100)
    await rm.release(binding)
    assert await free(rm) == {"a": 8}


async def test_a_note_is_read_by_others_and_ends_with_its_binding(rm, place):
    await rm.register(Pool("a", hardware="H800", total=8))
    binding = await rm.bind(Request("x", prefer=["H800"]), timeout=0)
    await rm.annotate(binding, {"address": "10.0.0.1:80"})
    other = await place.connect()
    assert (await other.status()).notes == {binding.id: {"address": "10.0.0.1:80"}}
    for wrong in ({"rank": 1}, "a text"):
        with pytest.raises(Invalid, match="must map strings to strings"):
            await rm.annotate(binding, wrong)
    await rm.release(binding)
    assert (await other.status()).notes == {}


async def test_what_is_no_request_and_no_pool_is_refused(rm):
    await rm.register(Pool("a", hardware="H800", total=8))
    request = Request("x", prefer=["H800"])
    many = [Request("x", prefer=[f"c{i}-{j}" for j in range(10)]) for i in range(200)]
    for asked, message in (
        (rm.register("a"), "takes a Pool"),
        (rm.bind("x"), "asked for by a Request"),
        (rm.bind(request, 0, "x"), "on_rebind='x' must be a function"),
        (rm.bind_all(None), "takes a list"),
        (rm.bind_all([None]), "asked for by a Request"),
        (rm.bind_all(many), "at most 1000 classes"),
        (rm.bind_all([Request("x", prefer=["H800"], amount=4000, chunk=0.5)] * 2), "10000 fractions"),
        (anext(rm.watch("x")), "must be the id of an event"),
        (anext(rm.watch(-1)), "must be the id of an event"),
    ):
        with pytest.raises(Invalid, match=message):
            await asked
    assert (await rm.status()).bindings == ()


async def test_close_releases_everything(rm, place):
    await rm.register(Pool("a", hardware="H800", total=8))
    await rm.bind(Request("x", prefer=["H800"], amount=8), timeout=0)
    other = await place.connect()
    await rm.close()
    await other.bind(Request("x", prefer=["H800"], amount=8), timeout=0)
