"""Who is served when something becomes free, and what those who give up leave behind."""

import asyncio

import pytest

from resmgr import (
    Binding,
    BindingBusy,
    BindTimeout,
    Closed,
    Invalid,
    Node,
    Pool,
    Request,
    ResourceManager,
    StaleBinding,
    wire,
)

pytestmark = pytest.mark.real


@pytest.fixture
async def rm(place) -> ResourceManager:
    manager = await place.connect()
    await manager.register(Pool("a", hardware="H800", total=4))
    await manager.register(Pool("b", hardware="H20", total=4))
    return manager


async def waiting(rm: ResourceManager, count: int) -> None:
    """Returns when `count` requests stand in the queue: each call to the store lets the others' calls through."""
    while len((await rm.status()).waiting) != count:
        pass


async def queue_up(
    rm: ResourceManager, *requests: Request, timeout: float | None = None
) -> list[asyncio.Task[Binding]]:
    tasks: list[asyncio.Task[Binding]] = []
    for request in requests:
        tasks.append(asyncio.create_task(rm.bind(request, timeout=timeout)))
        await waiting(rm, len(tasks))
    return tasks


async def test_a_large_request_is_not_starved_by_small_ones(rm):
    held = [await rm.bind(Request("x", prefer=["H800"]), timeout=0) for _ in range(4)]
    large, small = await queue_up(rm, Request("large", prefer=["H800"], amount=4), Request("small", prefer=["H800"]))
    for binding in held[:3]:
        await rm.release(binding)
    await waiting(rm, 2)
    await rm.release(held[3])
    await rm.release(await large)
    await rm.release(await small)


async def test_newcomers_go_behind_those_who_wait(rm):
    await rm.bind(Request("x", prefer=["H800"], amount=3), timeout=0)
    (large,) = await queue_up(rm, Request("large", prefer=["H800"], amount=2))
    with pytest.raises(BindTimeout):
        await rm.bind(Request("new", prefer=["H800"]), timeout=0)
    landed = await rm.bind(Request("new", prefer=["H800"], fallback=["H20"]), timeout=0)
    assert landed.hardware == "H20"
    large.cancel()
    await asyncio.wait([large])


async def test_priority_goes_first(rm):
    held = await rm.bind(Request("x", prefer=["H800"], amount=4), timeout=0)
    low, high = await queue_up(
        rm,
        Request("low", prefer=["H800"], amount=3),
        Request("high", prefer=["H800"], amount=3, priority=5),
    )
    await rm.release(held)
    assert (await high).role == "high"
    assert not low.done()
    await rm.release(await high)
    assert (await low).role == "low"


async def test_a_waiter_is_served_by_whichever_class_frees_first(rm):
    await rm.bind(Request("x", prefer=["H800"], amount=4), timeout=0)
    other = await rm.bind(Request("x", prefer=["H20"], amount=4), timeout=0)
    (task,) = await queue_up(rm, Request("gen", prefer=["H800"], fallback=["H20"], amount=2, gang=True))
    await rm.release(other)
    binding = await task
    assert (binding.hardware, binding.fell_back) == ("H20", True)
    assert (await rm.status()).waiting == ()


async def test_a_waiter_does_not_hold_up_a_class_that_could_never_serve_it(rm):
    await rm.register(Pool("c", hardware="small", total=1))
    await rm.bind(Request("x", prefer=["H800"], amount=4), timeout=0)
    (task,) = await queue_up(rm, Request("gen", prefer=["H800"], fallback=["small"], amount=2))
    await rm.bind(Request("y", prefer=["small"]), timeout=0)
    task.cancel()
    await asyncio.wait([task])


async def test_a_waiter_holds_up_only_the_nodes_that_its_labels_allow(rm):
    nodes = [Node("n0", 2, labels={"zone": "x"}), Node("n1", 2, labels={"zone": "y"})]
    await rm.register(Pool("z", hardware="Z", nodes=nodes))
    held = await rm.bind(Request("a", prefer=["Z"], labels={"zone": "x"}), timeout=0)
    (wide,) = await queue_up(rm, Request("b", prefer=["Z"], amount=2, labels={"zone": "x"}))
    with pytest.raises(BindTimeout):
        await rm.bind(Request("c", prefer=["Z"], labels={"zone": "x"}), timeout=0)
    elsewhere = await rm.bind(Request("c", prefer=["Z"]), timeout=0)
    assert elsewhere.nodes == ("n1",)
    await rm.release(held)
    assert (await wide).amount == 2


async def test_a_new_pool_serves_the_queue(rm):
    await rm.bind(Request("x", prefer=["H800"], amount=4), timeout=0)
    (task,) = await queue_up(rm, Request("gen", prefer=["H800"], amount=3))
    await rm.register(Pool("more", hardware="H800", total=3))
    assert (await task).allocations[0].pool == "more"


async def test_a_class_that_grows_serves_those_who_wait_elsewhere(rm):
    await rm.register(Pool("c", hardware="small", total=1))
    await rm.bind(Request("x", prefer=["H800"], amount=4), timeout=0)
    one = Request("gen", prefer=["H800"], fallback=["small"], amount=2)
    first, second = await queue_up(rm, one, one)
    both = asyncio.create_task(rm.bind_all([one, Request("more", prefer=["H20"], amount=4)]))
    await waiting(rm, 3)
    await rm.register(Pool("c", hardware="small", total=3), replace=True)
    assert (await first).hardware == "small"
    assert [w.classes for w in (await rm.status()).waiting] == [("H800", "small"), ("H800", "H20", "small")]
    await rm.register(Pool("c", hardware="small", total=6), replace=True)
    assert (await second).hardware == "small"
    assert [b.hardware for b in await both] == ["small", "H20"]


@pytest.mark.parametrize("owner", [True, False])
async def test_growth_of_a_binding_that_ends_is_over(rm, place, owner):
    binding = await rm.bind(Request("x", prefer=["H800"], amount=2), timeout=0)
    await rm.bind(Request("y", prefer=["H800"], amount=2), timeout=0)
    growing = asyncio.create_task(rm.reconfigure(binding, 4))
    await waiting(rm, 1)
    await (rm if owner else await place.connect()).release(binding)
    with pytest.raises(StaleBinding, match="ended while it waited to grow"):
        await asyncio.wait_for(growing, 10)


async def test_growth_waits_its_turn(rm):
    binding = await rm.bind(Request("x", prefer=["H800"], amount=2), timeout=0)
    other = await rm.bind(Request("y", prefer=["H800"], amount=2), timeout=0)
    growing = asyncio.create_task(rm.reconfigure(binding, 4))
    await waiting(rm, 1)
    with pytest.raises(BindingBusy, match="cancel that reconfigure first"):
        await rm.reconfigure(binding, 1)
    await rm.release(other)
    assert (await growing).amount == 4
    assert rm.bindings[binding.id].amount == 4


async def test_a_timeout_leaves_the_queue_and_lets_the_next_one_through(rm):
    await rm.bind(Request("x", prefer=["H800"], amount=3), timeout=0)
    first = asyncio.create_task(rm.bind(Request("large", prefer=["H800"], amount=2), timeout=0.15))
    await waiting(rm, 1)
    second = asyncio.create_task(rm.bind(Request("small", prefer=["H800"])))
    with pytest.raises(BindTimeout, match="within"):
        await first
    assert (await second).amount == 1


@pytest.mark.parametrize("steps", range(6))
async def test_a_cancelled_bind_hands_on_what_it_was_given(rm, steps):
    held = await rm.bind(Request("x", prefer=["H800"], amount=4), timeout=0)
    (first,) = await queue_up(rm, Request("one", prefer=["H800"], amount=4))
    second = asyncio.create_task(rm.bind(Request("two", prefer=["H800"], amount=4)))
    await waiting(rm, 2)
    releasing = asyncio.create_task(rm.release(held))
    for _ in range(steps):
        await asyncio.sleep(0)
    first.cancel()
    await releasing
    outcome = (await asyncio.gather(first, return_exceptions=True))[0]
    if isinstance(outcome, Binding):
        await rm.release(outcome)
    assert (await second).role == "two"


@pytest.mark.parametrize("steps", range(8))
async def test_a_bind_cancelled_while_it_asks_holds_nothing(rm, steps):
    task = asyncio.create_task(rm.bind(Request("x", prefer=["H800"], amount=4)))
    for _ in range(steps):
        await asyncio.sleep(0)
    cancelled = task.cancel()
    outcome = (await asyncio.gather(task, return_exceptions=True))[0]
    assert isinstance(outcome, asyncio.CancelledError) == cancelled
    if isinstance(outcome, Binding):
        await rm.release(outcome)
    await rm.release(await rm.bind(Request("y", prefer=["H800"], amount=4), timeout=5))


async def test_a_bind_that_arrives_after_its_withdrawal_is_not_granted(rm):
    request = Request("x", prefer=["H800"], amount=4)
    session = await rm._session.ready()
    assert await rm._store.call("withdraw", "late", b"\x91\xa4late", "0") == [b"withdrawn"]
    late = ("bind", session, "late", wire.spec_of(request), "1", "", b"")
    assert await rm._store.call(*late) == [b"withdrawn"]
    await rm.bind(request, timeout=0)


@pytest.mark.parametrize("timeout", [float("nan"), -1, "5", True])
async def test_a_timeout_that_means_nothing_is_refused(rm, timeout):
    request = Request("x", prefer=["H800"])
    binding = await rm.bind(request, timeout=float("inf"))
    for asked in (rm.bind(request, timeout), rm.bind_all([request], timeout), rm.reconfigure(binding, 2, timeout)):
        with pytest.raises(Invalid, match="timeout="):
            await asked
    assert [b.amount for b in (await rm.status()).bindings] == [1]


@pytest.mark.parametrize("steps", range(5))
@pytest.mark.parametrize("amount", [1, 4])
async def test_a_cancelled_reconfigure_is_done_or_not_and_the_manager_knows(rm, steps, amount):
    binding = await rm.bind(Request("x", prefer=["H800"], amount=2), timeout=0)
    task = asyncio.create_task(rm.reconfigure(binding, amount))
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    await rm.check(binding)
    assert (await rm.status()).bindings == tuple(rm.bindings.values())
    assert (await rm.reconfigure(binding, 3)).amount == 3


async def test_a_change_that_the_manager_missed_is_told_once(rm):
    binding = await rm.bind(Request("x", prefer=["H800"], amount=2), timeout=0)
    session, spec = await rm._session.ready(), wire.spec_of(Request("x", prefer=["H800"]))
    await rm._store.call("reconfigure", session, binding.id, str(binding.token), 2000, 3000, spec, spec, "0", "")
    with pytest.raises(StaleBinding, match="changed to 3 meanwhile"):
        await rm.reconfigure(binding, 1)
    assert (await rm.reconfigure(rm.bindings[binding.id], 1)).amount == 1


@pytest.mark.parametrize("steps", range(6))
async def test_a_cancelled_release_is_carried_out(rm, steps):
    binding = await rm.bind(Request("x", prefer=["H800"], amount=4), timeout=0)
    task = asyncio.create_task(rm.release(binding))
    await asyncio.sleep(0)
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    await rm.bind(Request("y", prefer=["H800"], amount=4), timeout=5)
    assert binding.id not in rm.bindings


async def test_those_who_wait_at_close_are_told(rm):
    await rm.bind(Request("x", prefer=["H800"], amount=4), timeout=0)
    (task,) = await queue_up(rm, Request("gen", prefer=["H800"]))
    await rm.close()
    with pytest.raises(Closed):
        await task
    with pytest.raises(Closed):
        await rm.bind(Request("gen", prefer=["H800"]))


async def test_hundreds_of_waiters_are_all_served_in_order(rm):
    order: list[int] = []

    async def one(number: int) -> None:
        binding = await rm.bind(Request("x", prefer=["H800"], amount=1))
        order.append(number)
        await rm.release(binding)

    held = await rm.bind(Request("x", prefer=["H800"], amount=4), timeout=0)
    tasks = []
    for number in range(200):
        tasks.append(asyncio.create_task(one(number)))
    await waiting(rm, 200)
    await rm.release(held)
    await asyncio.gather(*tasks)
    assert sorted(order) == list(range(200))
    assert (await rm.status()).bindings == ()
