"""What only the Ray face can meet: other processes that die, payloads that are gone, replies that cross."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
import ray
from ray.exceptions import RayError

from samplebuffer import Closed, InvalidConfig, InvalidReward, Unsendable
from samplebuffer.errors import BufferLost
from samplebuffer.ray import RayBuffer, RayTicket, client, wire
from samplebuffer.ray.link import Link

pytestmark = [pytest.mark.real, pytest.mark.timeout(400), pytest.mark.usefixtures("ray_cluster")]


class Rollouts:
    """A process with many rollout coroutines, to be killed."""

    async def pid(self) -> int:
        return os.getpid()

    async def take(self, handle: Any, n: int) -> list[int]:
        self.buf = RayBuffer(handle)
        self.tickets: list[RayTicket] = [await self.buf.next_ticket() for _ in range(n)]
        return [ticket.id for ticket in self.tickets]

    async def finish(self, n: int, size: int) -> None:
        for ticket in self.tickets[:n]:
            ticket.stamp(0)
            await ticket.finish(bytes(size), 1.0)

    async def run(self, handle: Any, producers: int, trajectories: int) -> int:
        async with RayBuffer(handle) as buf:
            await asyncio.gather(*(self.produce(buf, trajectories // producers) for _ in range(producers)))
        return trajectories

    async def produce(self, buf: RayBuffer, n: int) -> None:
        for _ in range(n):
            ticket = await buf.next_ticket()
            ticket.stamp(ticket.issued_version)
            assert await ticket.finish(ticket.id.to_bytes(4096, "big"), 1.0) == "accepted"


@pytest.fixture
async def buf() -> AsyncIterator[RayBuffer]:
    buffer = RayBuffer.create(range(1000), batch_groups=1, group_size=2, alpha=3, lease=3.0)
    yield buffer
    await buffer.leave()


def rollouts() -> Any:
    return ray.remote(Rollouts).options(num_cpus=0).remote()


async def test_payloads_go_from_process_to_process_and_commands_share_calls() -> None:
    buf = RayBuffer.create(range(1000), batch_groups=4, group_size=8, alpha=1)
    worker = rollouts()
    running = worker.run.remote(buf.handle, 64, 512)
    seen = set()
    for version in range(1, 16):
        batch = await buf.get_batch(trainer_version=version)
        assert all(sample.payload == sample.ticket_id.to_bytes(4096, "big") for sample in batch.samples)
        seen |= {sample.ticket_id for sample in batch.samples}
    assert await running == 512
    stats = await buf.stats()
    assert len(seen) == stats.ledger.delivered == 15 * 32 and stats.ledger.balanced
    await buf.leave()


async def test_a_client_that_dies_loses_its_tickets_and_payloads_to_replacements(buf: RayBuffer) -> None:
    worker = rollouts()
    ids = await worker.take.remote(buf.handle, 4)
    assert ids == [0, 1, 2, 3]
    await worker.finish.remote(1, 10)
    own = [await buf.next_ticket() for _ in range(4)]
    assert [t.key for t in own] == [2, 2, 3, 3]
    ray.kill(worker)
    replacements = [await buf.next_ticket() for _ in range(4)]  # after the lease
    assert [(t.key, t.member) for t in replacements] == [(0, 2), (0, 3), (1, 2), (1, 3)]
    ledger = await buf.ledger()
    assert (ledger.failed, ledger.running, ledger.balanced) == (4, 8, True)


async def test_a_batch_with_lost_payloads_is_filled_again(buf: RayBuffer, monkeypatch: pytest.MonkeyPatch) -> None:
    for ticket in [await buf.next_ticket() for _ in range(4)]:
        ticket.stamp(0)
        await ticket.finish(ticket.id, 1.0)
    fetch = client._values

    async def gone(refs: list[Any]) -> list[Any]:
        monkeypatch.setattr(client, "_values", fetch)
        return [None, *(await fetch(refs[1:]))]

    monkeypatch.setattr(client, "_values", gone)
    assert {sample.payload for sample in (await buf.get_batch()).samples} == {2, 3}
    ledger = await buf.ledger()
    assert (ledger.failed, ledger.delivered, ledger.balanced) == (1, 2, True)
    replacement = await buf.next_ticket()
    assert (replacement.key, replacement.member) == (0, 2)


async def test_a_consumer_cancelled_while_it_fetches_gives_the_batch_back(
    buf: RayBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for ticket in [await buf.next_ticket() for _ in range(2)]:
        ticket.stamp(0)
        await ticket.finish(ticket.id, 1.0)
    fetch, fetching = client._values, asyncio.Event()

    async def stuck(refs: list[Any]) -> list[Any]:
        fetching.set()
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(client, "_values", stuck)
    consumer = asyncio.create_task(buf.get_batch())
    await fetching.wait()
    assert (await buf.stats()).groups.alive == 1, "a lent batch occupies its room"
    consumer.cancel()
    await asyncio.gather(consumer, return_exceptions=True)
    monkeypatch.setattr(client, "_values", fetch)
    assert {sample.payload for sample in (await buf.get_batch()).samples} == {0, 1}
    assert (await buf.ledger()).delivered == 2


async def test_a_consumer_given_up_while_it_fetches_gets_no_batch_that_is_alive_again(
    buf: RayBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for ticket in [await buf.next_ticket() for _ in range(4)]:
        ticket.stamp(0)
        await ticket.finish(ticket.id, 1.0)
    fetch = client._values

    async def slow(refs: list[Any]) -> list[Any]:
        monkeypatch.setattr(client, "_values", fetch)
        await buf.handle.leave.remote(buf._name)
        return await fetch(refs)

    monkeypatch.setattr(client, "_values", slow)
    batches = [await buf.get_batch(), await buf.get_batch()]
    assert sorted(sample.payload for batch in batches for sample in batch.samples) == [0, 1, 2, 3]
    ledger = await buf.ledger()
    assert (ledger.delivered, ledger.buffered, ledger.balanced) == (4, 0, True)


async def test_a_client_given_up_though_alive_asks_again_and_learns_that_its_tickets_ended(buf: RayBuffer) -> None:
    tickets = [await buf.next_ticket() for _ in range(8)]
    reasons: asyncio.Queue[str] = asyncio.Queue()
    tickets[0].on_cancel(reasons.put_nowait)
    waiter = asyncio.create_task(buf.next_ticket())
    await asyncio.sleep(0)
    await buf.handle.leave.remote(buf._name, "client lost")  # as after a long silence
    assert (await waiter).key == 0 and await reasons.get() == "failed"
    assert await tickets[0].finish("late", 1.0) == "ended"
    consumer = asyncio.create_task(buf.get_batch())
    await buf.stats()
    await buf.handle.leave.remote(buf._name, "client lost")
    for ticket in [await buf.next_ticket() for _ in range(2)]:
        ticket.stamp(0)
        await ticket.finish("x", 1.0)
    assert len((await consumer).samples) == 2


async def test_nothing_is_lost_or_doubled_while_clients_are_given_up_and_producers_cancelled() -> None:
    buf = RayBuffer.create(range(1000), batch_groups=1, group_size=2, alpha=3, max_replacements=1000)
    chance = random.Random(0)

    async def produce() -> None:
        with suppress(Closed):
            while True:
                ticket = await buf.next_ticket()
                ticket.stamp(ticket.issued_version)
                await asyncio.sleep(chance.random() * 0.01)
                await (ticket.fail("chance") if chance.random() < 0.1 else ticket.finish(ticket.id, 1.0))

    async def give_up() -> None:
        while True:
            await asyncio.sleep(chance.random() * 0.3)
            await buf.handle.leave.remote(buf._name, "client lost")

    producers = [asyncio.create_task(produce()) for _ in range(12)]
    chaos = asyncio.create_task(give_up())
    seen: set[int] = set()
    for turn in range(30):
        batch = await buf.get_batch()
        assert all(sample.payload == sample.ticket_id and sample.ticket_id not in seen for sample in batch.samples)
        seen |= {sample.ticket_id for sample in batch.samples}
        producers[turn % 12].cancel()
        await asyncio.gather(producers[turn % 12], return_exceptions=True)
        producers[turn % 12] = asyncio.create_task(produce())
    chaos.cancel()
    await asyncio.gather(chaos, return_exceptions=True)
    ledger = await buf.ledger()
    assert ledger.balanced and ledger.delivered == len(seen) == 60
    await buf.close()
    await asyncio.gather(*producers)
    await buf.leave()


async def test_a_payload_that_can_not_be_sent_is_its_producers_error_alone(buf: RayBuffer) -> None:
    good, bad = await buf.next_ticket(), await buf.next_ticket()
    for ticket in (good, bad):
        ticket.stamp(0)
    generator = (x for x in "abc")
    answers = await asyncio.gather(good.finish("fine", 1.0), bad.finish(generator, 1.0), return_exceptions=True)
    assert answers[0] == "accepted" and isinstance(answers[1], Unsendable)
    assert await bad.fail("unsendable")


def explode() -> None:
    raise OSError("no such device")


class Unreadable:
    """Can be put into the store, and not be taken out."""

    def __reduce__(self) -> Any:
        return explode, ()


async def test_a_payload_that_the_consumer_can_not_read_is_its_error_and_stays(buf: RayBuffer) -> None:
    for ticket in [await buf.next_ticket() for _ in range(2)]:
        ticket.stamp(0)
        await ticket.finish(Unreadable(), 1.0)
    with pytest.raises(RayError, match="no such device"):
        await buf.get_batch()
    ledger = await buf.ledger()
    assert (ledger.failed, ledger.buffered, ledger.delivered) == (0, 2, 0)
    with pytest.raises(RayError, match="no such device"):
        await buf.state_dict()


async def test_the_death_of_the_actor_wakes_everyone(buf: RayBuffer) -> None:
    ticket = await buf.next_ticket()
    reasons: asyncio.Queue[str] = asyncio.Queue()
    ticket.on_cancel(reasons.put_nowait)
    for _ in range(7):
        await buf.next_ticket()
    waiters = [asyncio.create_task(buf.next_ticket()), asyncio.create_task(buf.get_batch())]
    await buf.stats()
    ray.kill(buf.handle)
    answers = await asyncio.gather(*waiters, return_exceptions=True)
    assert [type(answer) for answer in answers] == [BufferLost, BufferLost] and isinstance(answers[0], Closed)
    assert await reasons.get() == "closed"
    with pytest.raises(BufferLost):
        await ticket.finish("too late", 1.0)


async def test_events_are_handed_on_in_order_whichever_reply_came_first() -> None:
    got: list[tuple[int, int]] = []
    link = Link.__new__(Link)
    link._early, link._expected = {}, (0, 0)
    link._on_events = lambda events: got.append((events.joined, events.number))
    for joined, number in [(1, 1), (1, 2), (1, 0), (1, 4), (2, 1), (1, 3), (2, 0), (1, 5)]:
        link._hand_on(wire.Events(joined, number))
    assert got == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1)] and not link._early


async def test_what_is_said_of_many_tickets_shares_packs_and_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    put, sizes = ray.put, list[int]()

    def counted(payloads: list[Any]) -> Any:
        sizes.append(len(payloads))
        return put(payloads)

    monkeypatch.setattr(ray, "put", counted)
    owner = RayBuffer.create(range(4), batch_groups=4, group_size=8, alpha=0)
    buf = RayBuffer(owner.handle, pack_bytes=8 * 1000, linger=60.0)
    for ticket in [await buf.next_ticket() for _ in range(30)]:
        ticket.stamp(0)
        ticket.finish(bytes(1000), 1.0)
    last, lost = await buf.next_ticket(), await buf.next_ticket()
    last.stamp(0)
    last.finish(bytes(1000), 1.0)
    lost.fail("no")
    await buf.leave()  # sends what waits
    ledger = await owner.ledger()
    assert (ledger.buffered, ledger.failed, ledger.running) == (31, 1, 0)
    assert sizes == [8, 8, 8, 6, 1], "packs are full, but for the last of a call"
    await owner.leave()


async def test_misuse_of_one_producer_is_no_concern_of_the_others(buf: RayBuffer) -> None:
    good, bad = await buf.next_ticket(), await buf.next_ticket()
    buf.length = lambda payload: 3.5  # type: ignore[assignment]
    for ticket in (good, bad):
        ticket.stamp(0)
    with pytest.raises(TypeError):
        bad.finish("x", 1.0)
    buf.length = len
    answers = await asyncio.gather(
        bad.finish("x", "much"),  # type: ignore[arg-type]
        bad.fail(OSError("\udcff")),
        good.finish("x", 1.0),
        return_exceptions=True,
    )
    assert isinstance(answers[0], InvalidReward) and list(answers[1:]) == [True, "accepted"]
    assert (await buf.stats()).ledger.balanced


@pytest.mark.parametrize(
    "sizes", [{"pack_bytes": 0}, {"pack_bytes": 1.5}, {"linger": -1.0}, {"linger": float("nan")}]
)
def test_bad_packing_is_named(sizes: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match=next(iter(sizes))):
        RayBuffer(None, **sizes)


@pytest.mark.parametrize("sizes", [{"lease": 0.0}, {"lease": float("inf")}, {"version": -1}, {"alpha": "x"}])
def test_what_no_actor_could_start_with_is_named_before_it_starts(sizes: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match=next(iter(sizes))):
        RayBuffer.create([], **({"batch_groups": 1, "group_size": 1} | sizes))


async def test_nothing_is_lost_or_doubled_when_processes_of_64_producers_are_killed() -> None:
    """kill -9 at any moment: while tickets run, while payloads are under way, with payloads in the queue."""
    buf = RayBuffer.create(range(10_000), batch_groups=4, group_size=8, alpha=1, max_replacements=1000, lease=3.0)
    chance = random.Random(0)
    workers = [rollouts() for _ in range(2)]
    for worker in workers:
        worker.run.remote(buf.handle, 32, 32 * 10_000)
    seen: set[int] = set()

    async def kill() -> None:
        for turn in range(4):
            await asyncio.sleep(chance.random())
            os.kill(await workers[turn % 2].pid.remote(), signal.SIGKILL)
            workers[turn % 2] = rollouts()
            workers[turn % 2].run.remote(buf.handle, 32, 32 * 10_000)

    killer = asyncio.create_task(kill())
    version = 0
    while not killer.done() or version < 20:
        batch = await buf.get_batch()
        assert all(sample.payload == sample.ticket_id.to_bytes(4096, "big") for sample in batch.samples)
        ids = {sample.ticket_id for sample in batch.samples}
        assert len(ids) == 32 and not ids & seen and batch.max_staleness <= 1
        seen |= ids
        version += 1
        await buf.advance(version)
    await killer
    await buf.close()
    stats = await buf.stats()
    assert stats.ledger.balanced and stats.ledger.delivered == len(seen) and stats.groups.given_up == 0
    for worker in workers:
        ray.kill(worker)
    await buf.leave()


async def test_a_ticket_whose_answer_nobody_waits_for_is_not_kept(buf: RayBuffer) -> None:
    """As when a rollout is cancelled while it hands in."""
    ticket = await buf.next_ticket()
    reasons: list[str] = []
    ticket.on_cancel(reasons.append)
    ticket.stamp(0)
    ticket.finish("x", 1.0).cancel()
    await buf.link().flush()
    assert (await buf.ledger()).buffered == 1 and not buf._tickets
    await buf.leave()
    assert not reasons


async def test_more_than_a_thousand_clients_leave_room_for_calls() -> None:
    buf = RayBuffer.create(range(10), batch_groups=1, group_size=1)
    waiting = [buf.handle.events.remote(f"client {number}") for number in range(1100)]
    async with asyncio.timeout(30):  # they wait longer
        assert (await buf.next_ticket()).key == 0
    assert len(waiting) == 1100
    ray.kill(buf.handle)
