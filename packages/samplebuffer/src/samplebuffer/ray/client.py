"""The buffer as a client process sees it: as `samplebuffer.SampleBuffer`, with awaitable answers.

A batch is fetched while it is lent, then pinned, so that it is nobody else's, and confirmed when it is returned. It
is given back when the caller is cancelled before that, and without the members whose payloads died with their process
(tests/samplebuffer/test_samplebuffer_ray.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from math import inf
from typing import Any, Self
from uuid import uuid4

import msgspec
import ray
from ray.exceptions import ObjectLostError, RayActorError, RayError

from samplebuffer.buffer import DEFAULT_CODEC
from samplebuffer.errors import BufferLost, Closed, InvalidConfig, SampleBufferError
from samplebuffer.limits import check_patience, check_version, make_limits
from samplebuffer.ray import wire
from samplebuffer.ray.actor import BufferActor
from samplebuffer.ray.link import Link
from samplebuffer.ray.pack import packs, weight
from samplebuffer.ray.ticket import RayTicket
from samplebuffer.state import Decodes, Encodes, decode_payload, encode_payload, parse
from samplebuffer.stats import Stats
from samplebuffer.values import Batch, Group, Ledger, Reason

PACK_BYTES = 2**25
LINGER_S = 0.01  # long beside a call to the actor, short beside an episode
CLIENTS = 100_000  # each has a call that waits in the actor; Ray's own limit is a thousand

decode_batch = msgspec.msgpack.Decoder(Batch).decode


class RayBuffer:
    """A client of the buffer that the actor `handle` holds. Give the handle to other processes, not the client.

    What is said of tickets is sent after `linger` seconds, or as soon as about `pack_bytes` of payloads wait: these
    share an object of Ray's store, which stays there until the last of them has ended. `length` measures payloads for
    the histograms, in the client.
    """

    def __init__(
        self,
        handle: Any,
        *,
        pack_bytes: int = PACK_BYTES,
        linger: float = LINGER_S,
        length: Callable[[Any], int] | None = None,
    ) -> None:
        if not isinstance(pack_bytes, int) or pack_bytes < 1:
            raise InvalidConfig("pack_bytes", pack_bytes, "give an integer of at least 1")
        if not 0 <= linger < inf:
            raise InvalidConfig("linger", linger, "give a finite number of seconds, at least 0")
        self.handle = handle
        self.length = length
        self._name = uuid4().hex
        self._packing = (pack_bytes, linger)
        self._link: Link | None = None
        self._joined: int | None = None
        self._over: SampleBufferError | None = None
        self._waiters: dict[asyncio.Future[RayTicket], None] = {}
        self._asked = 0
        self._loans = 0
        self._tickets: dict[int, RayTicket] = {}

    @classmethod
    def create(
        cls,
        tasks: Iterable[Any] | Callable[[], Iterable[Any]],
        *,
        lease: float = 120.0,
        actor_options: dict[str, Any] | None = None,
        pack_bytes: int = PACK_BYTES,
        linger: float = LINGER_S,
        length: Callable[[Any], int] | None = None,
        **sizes: Any,
    ) -> Self:
        """Start the actor and be its first client.

        `tasks` is sent to the actor, or made there if it is a function. `sizes` are those of `SampleBuffer`; `keep`
        runs in the actor, and sees rewards and versions but no payloads. A client that is silent for `lease` seconds
        is given up.
        """
        check_version(sizes.get("version", 0))
        check_patience(sizes.get("patience", 0.0))
        defaults = {"alpha": 1, "spare_groups": 0, "spare_members": 0, "max_replacements": None}
        no_sizes = ("keep", "version", "patience")
        make_limits(**(defaults | {name: value for name, value in sizes.items() if name not in no_sizes}))
        return cls(_start(tasks, lease, sizes, actor_options), pack_bytes=pack_bytes, linger=linger, length=length)

    @classmethod
    async def restore(
        cls,
        saved: dict[str, Any],
        tasks: Iterable[Any] | Callable[[], Iterable[Any]],
        *,
        codec: Decodes = DEFAULT_CODEC,
        keep: Callable[[Group], bool] | None = None,
        skip_drawn: bool = True,
        patience: float = 0.0,
        lease: float = 120.0,
        actor_options: dict[str, Any] | None = None,
        pack_bytes: int = PACK_BYTES,
        linger: float = LINGER_S,
        length: Callable[[Any], int] | None = None,
    ) -> Self:
        """As `SampleBuffer.restore`, in a new actor; this process owns the restored payloads."""
        check_patience(patience)
        parse(saved)
        samples = [sample for group in saved["groups"] for sample in group["samples"]]
        payloads = [decode_payload(codec, sample["ticket_id"], sample["payload"]) for sample in samples]
        cuts = list(packs(map(weight, payloads), pack_bytes))
        refs = [await asyncio.to_thread(ray.put, payloads[cut]) for cut in cuts]
        places = iter([number, item] for number, cut in enumerate(cuts) for item in range(cut.stop - cut.start))
        groups = [
            group | {"samples": [sample | {"payload": wire.encode(next(places))} for sample in group["samples"]]}
            for group in saved["groups"]
        ]
        buffer = cls(None, pack_bytes=pack_bytes, linger=linger, length=length)
        options = {
            "restore": (saved | {"groups": groups}, refs, buffer._name),
            "keep": keep,
            "skip_drawn": skip_drawn,
            "patience": patience,
        }
        buffer.handle = _start(tasks, lease, options, actor_options)
        return buffer

    def link(self) -> Link:
        """The line to the actor, opened at first use."""
        if self._link is None:
            self._link = Link(self.handle, self._name, *self._packing, self._happened, self._lost)
        return self._link

    # Tickets.

    async def next_ticket(self) -> RayTicket:
        """The next trajectory to run. Raises Exhausted, Closed, BufferLost."""
        if self._over is not None:
            raise self._over
        waiter: asyncio.Future[RayTicket] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        self._ask()
        try:
            return await waiter
        except asyncio.CancelledError:
            self._waiters.pop(waiter, None)
            if not waiter.cancelled() and waiter.exception() is None:
                self._withdraw(waiter.result().id)
            raise

    def forget(self, ticket: RayTicket) -> None:
        """This ticket's producer is done with it."""
        self._tickets.pop(ticket.id, None)

    def _ask(self) -> None:
        if (missing := len(self._waiters) - self._asked) > 0:
            self._asked += missing
            self.link().ask(missing)

    def _withdraw(self, ticket_id: int) -> None:
        self._tickets.pop(ticket_id, None)
        self.link().withdraw(ticket_id)

    def _happened(self, events: wire.Events) -> None:
        if self._joined not in (None, events.joined):  # the actor had given this client up
            self._end_tickets("failed")
        self._joined = events.joined
        for info in events.granted:
            self._asked -= 1
            self._grant(info)
        for ended in events.ended:
            if (ticket := self._tickets.pop(ended.ticket, None)) is not None:
                ticket.end(ended.reason)
        if events.over is not None:
            self._end(events.over.to_error())
        if self.link().settled:  # then the actor's count is right, also after it gave this client up
            self._asked = events.asking
        self._ask()

    def _grant(self, info: wire.TicketInfo) -> None:
        while self._waiters:
            waiter = next(iter(self._waiters))
            del self._waiters[waiter]
            if not waiter.done():
                ticket = self._tickets[info.id] = RayTicket(self, info)
                waiter.set_result(ticket)
                return
        self._withdraw(info.id)

    def _lost(self, error: SampleBufferError) -> None:
        self._end(error)
        self._end_tickets("closed")

    def _end_tickets(self, reason: Reason) -> None:
        tickets, self._tickets = self._tickets, {}
        for ticket in tickets.values():
            ticket.end(reason)

    def _end(self, error: SampleBufferError) -> None:
        self._over = error
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(error)
        self._waiters.clear()

    # Batches.

    async def get_batch(
        self,
        timeout: float | None = None,
        *,
        partial: bool = False,
        trainer_version: int | None = None,
        cancel_spares: bool = False,
        rest: bool = False,
    ) -> Batch:
        """As `SampleBuffer.get_batch`; the payloads are fetched straight from where they are."""
        take = {
            "partial": partial,
            "trainer_version": trainer_version,
            "cancel_spares": cancel_spares,
            "rest": rest,
        }
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        while True:
            left = None if deadline is None else max(deadline - loop.time(), 0.0)
            self.link()  # a client with a loan must be heard of
            loan, self._loans = self._loans, self._loans + 1
            try:
                lent = await _answer(self.handle.lend.remote(self._name, loan, left, take))
                if lent is None:
                    continue
                if isinstance(lent, Exception):
                    raise lent
                batch, lost = await _fetch(*lent)
                mine = not lost and await _answer(self.handle.pin.remote(self._name, loan))
            except asyncio.CancelledError:
                self.handle.reclaim.remote(self._name, loan, [])
                raise
            except RayError:  # of a payload that is there and can not be read: it is not lost
                await _answer(self.handle.reclaim.remote(self._name, loan, []))
                raise
            if mine:
                self.handle.confirm.remote(self._name, loan)
                return batch
            await _answer(self.handle.reclaim.remote(self._name, loan, lost))

    # The rest.

    async def advance(self, version: int) -> list[wire.TicketInfo]:
        """As `SampleBuffer.advance`; the clients that hold the ended tickets are being told."""
        ended = await _answer(self.handle.advance.remote(version))
        if isinstance(ended, Exception):
            raise ended
        return ended

    async def cancel_spares(self) -> list[wire.TicketInfo]:
        """As `SampleBuffer.cancel_spares`."""
        return await _answer(self.handle.cancel_spares.remote())

    async def wake(self) -> None:
        """As `SampleBuffer.wake`."""
        await _answer(self.handle.wake.remote())

    async def close(self) -> None:
        """As `SampleBuffer.close`, for all clients. The actor stays, for `state_dict`, until its handles are gone."""
        await _answer(self.handle.close.remote())

    async def ledger(self) -> Ledger:
        """As `SampleBuffer.ledger`."""
        return (await self.stats()).ledger

    async def stats(self) -> Stats:
        """As `SampleBuffer.stats`; waits are those in the actor."""
        return await _answer(self.handle.stats.remote())

    async def state_dict(self, codec: Encodes = DEFAULT_CODEC) -> dict[str, Any]:
        """As `SampleBuffer.state_dict`; members whose payload died with its process are failed first."""
        while True:
            saved, refs = await _answer(self.handle.save.remote())
            values = await _values(refs)
            samples = [sample for group in saved["groups"] for sample in group["samples"]]
            places = {sample["ticket_id"]: msgspec.msgpack.decode(sample["payload"]) for sample in samples}
            lost = [ticket_id for ticket_id, (number, _) in places.items() if values[number] is None]
            if lost:
                await _answer(self.handle.drop.remote(lost))
                continue
            for sample in samples:
                number, item = places[sample["ticket_id"]]
                sample["payload"] = encode_payload(codec, sample["ticket_id"], values[number][item])
            return saved

    async def leave(self) -> None:
        """Stop being a client: send what was said, give tickets back, wake this process's waiters with Closed."""
        if self._link is not None:
            await self._link.flush()
            await self._link.close()
            with suppress(BufferLost):  # then there is nobody to leave
                await _answer(self.handle.leave.remote(self._name))
        self._lost(Closed("this client has left"))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.leave()


def _start(tasks: Any, lease: float, options: dict[str, Any], actor_options: dict[str, Any] | None) -> Any:
    if not 0 < lease < inf:
        raise InvalidConfig("lease", lease, "give a finite number of seconds above 0")
    defaults = {"num_cpus": 0, "max_concurrency": CLIENTS}
    actor = ray.remote(BufferActor).options(**(defaults | (actor_options or {})))
    return actor.remote(tasks, lease, options)


async def _answer(call: Any) -> Any:
    try:
        return await call
    except RayActorError as error:
        raise BufferLost(f"the actor of the buffer is gone: {error}") from error


async def _values(refs: list[Any]) -> list[list[Any] | None]:
    """The lists of payloads; None for those that are gone. One that is there but can not be read is an error."""
    try:
        return await asyncio.to_thread(ray.get, refs)
    except ObjectLostError:
        return [await _value(ref) for ref in refs]


async def _value(ref: Any) -> list[Any] | None:
    try:
        return await asyncio.to_thread(ray.get, ref)
    except ObjectLostError:
        return None


async def _fetch(message: bytes, refs: list[Any]) -> tuple[Batch, list[int]]:
    """The batch with its payloads, and the tickets whose payload is gone."""
    batch = decode_batch(message)
    values = await _values(refs)
    lost: list[int] = []
    groups: list[Group] = []
    for group in batch.groups:
        samples = []
        for sample in group.samples:
            number, item = sample.payload
            if (pack := values[number]) is None:
                lost.append(sample.ticket_id)
            else:
                samples.append(msgspec.structs.replace(sample, payload=pack[item]))
        groups.append(Group(group.key, group.group_id, samples))
    return msgspec.structs.replace(batch, groups=groups), lost
