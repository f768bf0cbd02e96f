"""Several requests bound in one step: all or none, fallbacks included, waiting as one; and nodes that are avoided."""

import asyncio
import itertools
import random
from typing import Any

import pytest

from resmgr import Binding, BindTimeout, Infeasible, Invalid, Node, Pool, Request, ResourceManager, UnknownHardware

pytestmark = pytest.mark.real


@pytest.fixture
async def rm(place) -> ResourceManager:
    manager = await place.connect()
    await manager.register(Pool("a", hardware="H800", total=8))
    await manager.register(Pool("b", hardware="H20", total=8))
    return manager


def gang(role: str, amount: float, *classes: str, **more) -> Request:
    return Request(role, prefer=classes[:1], fallback=classes[1:], amount=amount, gang=True, **more)


async def free(rm: ResourceManager) -> dict[str, float]:
    return {pool.name: pool.free for pool in (await rm.status()).pools}


async def test_all_are_granted_in_one_step_each_on_its_class(rm):
    before = (await rm.status()).position
    train, gen = await rm.bind_all([gang("train", 4, "H800"), gang("gen", 8, "H20", "H800")])
    assert (train.role, train.hardware, gen.role, gen.hardware) == ("train", "H800", "gen", "H20")
    assert await free(rm) == {"a": 4, "b": 0}
    assert (await rm.status()).position == before + 2
    await rm.release(train)
    await rm.release(gen)
    assert await free(rm) == {"a": 8, "b": 8}


async def test_none_is_granted_when_one_has_no_place(rm):
    held = await rm.bind(gang("x", 6, "H20"), timeout=0)
    with pytest.raises(BindTimeout, match="4 of H800 for 'train' with 4 of H20 for 'gen' is not free now"):
        await rm.bind_all([gang("train", 4, "H800"), gang("gen", 4, "H20")], timeout=0)
    assert await free(rm) == {"a": 8, "b": 2} and set(rm.bindings) == {held.id}


async def test_an_earlier_one_falls_back_so_that_a_later_one_finds_its_place(rm):
    flexible, strict = await rm.bind_all([gang("gen", 8, "H800", "H20"), gang("train", 4, "H800")])
    assert (flexible.hardware, flexible.fell_back, strict.hardware) == ("H20", True, "H800")


async def test_what_fits_one_by_one_but_never_together_is_refused_at_once(rm):
    with pytest.raises(Infeasible, match="never all together: 6 of H800 for 'a' with 6 of H800 for 'b'"):
        await rm.bind_all([gang("a", 6, "H800"), gang("b", 6, "H800")])
    with pytest.raises(Infeasible, match=r"9 for 'b' can never be granted: H800: 8 would fit"):
        await rm.bind_all([gang("a", 6, "H800"), gang("b", 9, "H800")])
    with pytest.raises(UnknownHardware, match="B200"):
        await rm.bind_all([gang("a", 6, "H800"), gang("b", 1, "B200")])
    assert await free(rm) == {"a": 8, "b": 8}
    assert (await rm.status()).waiting == ()


async def test_it_waits_as_one_and_nobody_overtakes_it(rm):
    held = await rm.bind(gang("x", 6, "H20"), timeout=0)
    waiting = asyncio.create_task(rm.bind_all([gang("train", 4, "H800"), gang("gen", 4, "H20")]))
    while not (await rm.status()).waiting:
        pass
    (row,) = (await rm.status()).waiting
    assert (row.role, row.amount, set(row.classes)) == ("train+gen", 8, {"H800", "H20"})
    with pytest.raises(BindTimeout):
        await rm.bind(gang("late", 1, "H800"), timeout=0)
    await rm.release(held)
    assert [b.hardware for b in await waiting] == ["H800", "H20"]
    await rm.bind(gang("late", 1, "H800"), timeout=0)


async def test_two_that_wait_for_the_same_classes_in_other_orders_both_get_them(rm):
    held = [await rm.bind(gang("x", 8, name), timeout=0) for name in ("H800", "H20")]
    first = asyncio.create_task(rm.bind_all([gang("a", 8, "H800"), gang("b", 8, "H20")], timeout=20))
    while len((await rm.status()).waiting) < 1:
        pass
    second = asyncio.create_task(rm.bind_all([gang("c", 8, "H20"), gang("d", 8, "H800")], timeout=20))
    while len((await rm.status()).waiting) < 2:
        pass
    for binding in reversed(held):
        await rm.release(binding)
    for binding in await first:
        await rm.release(binding)
    assert [b.role for b in await second] == ["c", "d"]


async def test_anti_affinity_holds_among_them(rm):
    await rm.register(Pool("n", hardware="L40", nodes=[Node("n0", 4), Node("n1", 4)]))
    train, gen = await rm.bind_all([gang("train", 2, "L40"), gang("gen", 2, "L40", apart=["train"])])
    assert set(train.nodes).isdisjoint(gen.nodes)
    with pytest.raises(Infeasible, match="never all together"):
        await rm.bind_all([gang("train", 6, "L40"), gang("gen", 2, "L40", apart=["train"])])


@pytest.mark.parametrize("steps", range(8))
async def test_a_caller_that_is_gone_leaves_nothing(rm, steps):
    binding = asyncio.create_task(rm.bind_all([gang("a", 8, "H800"), gang("b", 8, "H20")]))
    for _ in range(steps):
        await asyncio.sleep(0)
    binding.cancel()
    await asyncio.wait([binding])
    if binding.cancelled():
        for name in ("H800", "H20"):
            await rm.release(await rm.bind(gang("x", 8, name), timeout=10))


async def test_a_timeout_leaves_the_queue(rm):
    held = await rm.bind(gang("x", 8, "H20"), timeout=0)
    with pytest.raises(BindTimeout, match=r"within 0.05 s"):
        await rm.bind_all([gang("a", 8, "H800"), gang("b", 8, "H20")], timeout=0.05)
    assert (await rm.status()).waiting == ()
    await rm.bind(gang("x", 8, "H800"), timeout=0)
    await rm.release(held)


async def test_a_wait_survives_the_loss_of_its_session(place):
    rm = await place.connect(ttl=0.3)
    await rm.register(Pool("a", hardware="H800", total=8))
    other = await place.connect()
    held = await other.bind(gang("x", 8, "H800"), timeout=0)
    waiting = asyncio.create_task(rm.bind_all([gang("a", 4, "H800"), gang("b", 4, "H800")]))
    while not (await other.status()).waiting:
        pass
    session = await rm._session.ready()
    await place.expire(session)
    while rm.stats().sessions < 2:
        await other.check(held)
    await other.release(held)
    assert [b.amount for b in await waiting] == [4, 4]


async def test_each_is_a_binding_of_its_own_afterwards(place):
    lost: asyncio.Queue[Any] = asyncio.Queue()
    rm = await place.connect()
    await rm.register(Pool("p", hardware="L40", nodes=[Node("n0", 4), Node("n1", 4), Node("n2", 4)]))
    on_rebind = lambda *pair: lost.put_nowait(pair)  # noqa: E731
    first, second = await rm.bind_all([gang("a", 4, "L40"), gang("b", 4, "L40")], on_rebind=on_rebind)
    (gone,) = first.nodes
    left = [Node(f"n{i}", 4) for i in range(3) if f"n{i}" != gone]
    await rm.register(Pool("p", hardware="L40", nodes=left), replace=True)
    old, new = await lost.get()
    assert old == first and new.role == "a" and gone not in new.nodes
    await rm.check(second)


async def test_how_many_is_bounded(rm):
    for requests in ([], [gang("a", 1, "H800")] * 1001):
        with pytest.raises(Invalid, match="takes a list of 1 to 1000"):
            await rm.bind_all(requests)


async def test_hundreds_are_bound_in_one_step(rm):
    await rm.register(Pool("w", hardware="wide", nodes=[Node(f"n{i}", 4) for i in range(250)]))
    bindings = await rm.bind_all([gang(f"r{i}", 1, "wide") for i in range(1000)])
    assert len({b.token for b in bindings}) == 1000 and (await free(rm))["w"] == 0


@pytest.mark.parametrize("seed", range(12))
async def test_nothing_is_half_bound_and_none_is_refused_beside_room(place, seed):
    """Random gangs over whole units, against a search through all choices of classes."""
    draw = random.Random(seed)
    rm = await place.connect()
    total = {name: draw.randint(2, 6) for name in ("A", "B", "C")}
    for name, amount in total.items():
        await rm.register(Pool(name, hardware=name, total=amount))
    live: list[Binding] = []
    for _ in range(40):
        if live and draw.random() < 0.4:
            await rm.release(live.pop(draw.randrange(len(live))))
            continue
        requests = []
        for number in range(draw.randint(1, 3)):
            classes = draw.sample(list(total), draw.randint(1, 3))
            requests.append(gang(f"r{number}", draw.randint(1, 4), *classes))
        room: dict[str, float] = dict(total)
        for binding in live:
            room[binding.hardware] -= binding.amount
        fits = any(
            all(
                sum(r.amount for r, c in zip(requests, pick, strict=True) if c == name) <= room[name] for name in room
            )
            for pick in itertools.product(*[[*r.prefer, *r.fallback] for r in requests])
        )
        try:
            live += await rm.bind_all(requests, timeout=0)
            assert fits
        except (BindTimeout, Infeasible):
            assert not fits
        used = {name: sum(b.amount for b in live if b.hardware == name) for name in total}
        assert await free(rm) == {name: total[name] - used[name] for name in total}


async def test_nodes_are_avoided_by_name(rm):
    await rm.register(Pool("n", hardware="L40", nodes=[Node("n0", 4), Node("n1", 4)]))
    binding = await rm.bind(gang("x", 4, "L40", avoid=["n0"]), timeout=0)
    assert binding.nodes == ("n1",)
    with pytest.raises(BindTimeout):
        await rm.bind(gang("x", 4, "L40", avoid=["n0"]), timeout=0)
    with pytest.raises(Infeasible, match="4 would fit"):
        await rm.bind(gang("x", 8, "L40", avoid=["n0"]), timeout=0)


async def test_a_binding_can_leave_a_node(rm):
    await rm.register(Pool("n", hardware="L40", nodes=[Node("n0", 4), Node("n1", 4)]))
    binding = await rm.bind(gang("x", 8, "L40"), timeout=0)
    for leave in ("n0", "n1"):
        smaller = await rm.reconfigure(binding, 6, leave=leave)
        assert {a.node: a.amount for a in smaller.allocations}[leave] == 2
        binding = await rm.reconfigure(smaller, 8, timeout=0)


async def test_what_did_not_die_stays_where_it_is(place):
    moved: asyncio.Queue[Any] = asyncio.Queue()
    rm = await place.connect()
    await rm.register(Pool("n", hardware="L40", nodes=[Node(f"n{i}", 4) for i in range(4)]))
    blocker = await rm.bind(gang("x", 8, "L40"), timeout=0)
    request = gang("y", 8, "L40")
    binding = await rm.bind(request, timeout=0, on_rebind=lambda *pair: moved.put_nowait(pair))
    stays, dies = binding.nodes
    await rm.release(blocker)
    nodes = [Node(f"n{i}", 4) for i in range(4) if f"n{i}" != dies]
    await rm.register(Pool("n", hardware="L40", nodes=nodes), replace=True)
    _, new = await moved.get()
    assert stays in new.nodes and dies not in new.nodes and new.amount == 8
