"""The buffer in an actor: clients' commands in, answers and events out. Payloads stay where they are.

What a client leaves behind when it is not heard of for `lease` seconds: its running tickets fail and are replaced, so
are the finished trajectories whose payloads it owned, and its unconfirmed batches are alive again.
Invariant: a ticket is held by one client, and a client gets each event once
(tests/samplebuffer/test_samplebuffer_ray.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from samplebuffer.buffer import SampleBuffer
from samplebuffer.errors import Closed, SampleBufferError
from samplebuffer.loans import confirm, drop, reclaim
from samplebuffer.ray import wire
from samplebuffer.stats import Stats
from samplebuffer.ticket import Ticket
from samplebuffer.values import Batch, Reason

log = logging.getLogger("samplebuffer")

LATE_TICKETS = 10_000  # ended tickets remembered to answer late finishes exactly; older ones are told "ended"


class Stored:
    """Where a payload is: item `index` of the list that `ref` refers to, put there by `client`."""

    __slots__ = ("client", "index", "length", "ref")

    def __init__(self, ref: Any, index: int, client: str, length: int | None = None) -> None:
        self.ref = ref
        self.index = index
        self.client = client
        self.length = length


class References:
    """Encodes values with [object, item] numbers in place of stored payloads, and collects the objects."""

    def __init__(self) -> None:
        self.refs: list[Any] = []
        self._numbers: dict[Any, int] = {}
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._place)

    def _place(self, stored: Stored) -> list[int]:
        number = self._numbers.setdefault(stored.ref, len(self.refs))
        if number == len(self.refs):
            self.refs.append(stored.ref)
        return [number, stored.index]

    def encode(self, payload: Any) -> bytes:
        """The value, as a codec of a state or as a message."""
        return self._encoder.encode(payload)


class Placed:
    """The other way: finds stored payloads by their numbers."""

    def __init__(self, refs: list[Any], client: str) -> None:
        self._refs = refs
        self._client = client

    def decode(self, data: bytes) -> Stored:
        """The payload that is there."""
        number, item = msgspec.msgpack.decode(data)
        return Stored(self._refs[number], item, self._client)


class Client:
    """What the actor knows of one client. `joined` tells the client when the actor had given it up meanwhile."""

    def __init__(self, joined: int) -> None:
        self.joined = joined
        self.seen = 0.0
        self.tickets: dict[int, Ticket] = {}
        self.asking: set[asyncio.Future[Ticket | None]] = set()
        self.borrowing: dict[int, asyncio.Task[Any]] = {}
        self.loans: dict[int, Batch] = {}
        self.pinned: set[int] = set()
        self.drained = 0
        self.events = wire.Events(joined, 0)
        self.news = asyncio.Event()
        self.gone = False

    def granted(self, ticket: Ticket) -> None:
        """The client holds a ticket, and is to be told; also when it ends."""
        self.tickets[ticket.id] = ticket
        self.events.granted.append(info(ticket))
        self.news.set()
        ticket.on_cancel(lambda reason: self._ended(ticket.id, reason))

    def _ended(self, ticket_id: int, reason: Reason) -> None:
        self.events.ended.append(wire.Ended(ticket_id, reason))
        self.news.set()

    def over(self, error: Closed) -> None:
        """No ticket can ever come."""
        self.events.over = wire.refusal(error)
        self.news.set()

    def drain(self) -> wire.Events:
        """What happened since the last call."""
        self.drained += 1
        events, self.events = self.events, wire.Events(self.joined, self.drained)
        events.asking = len(self.asking)
        self.news.clear()
        return events

    def forget_late(self) -> None:
        """Forget the oldest tickets that have ended, when there are many."""
        while len(self.tickets) > LATE_TICKETS:
            oldest = next((t.id for t in self.tickets.values() if t.state != "running"), None)
            if oldest is None:
                return
            del self.tickets[oldest]


class BufferActor:
    """The methods that clients call. All but `lend` and `events` answer without waiting."""

    def __init__(
        self, tasks: Iterable[Any] | Callable[[], Iterable[Any]], lease: float, options: dict[str, Any]
    ) -> None:
        self._clients: dict[str, Client] = {}
        self._lease = lease
        self._watch: asyncio.Task[None] | None = None
        self._joined = 0
        tasks = tasks() if callable(tasks) else tasks
        if (restored := options.pop("restore", None)) is None:
            self._buf = SampleBuffer(tasks, length=length, **options)
        else:
            saved, refs, client = restored
            self._buf = SampleBuffer.restore(saved, tasks, codec=Placed(refs, client), length=length, **options)

    async def exchange(self, name: str, message: bytes, packs: list[Any]) -> bytes:
        """Carry out a client's commands, in order."""
        client = self._client(name)
        answers = [self._carry_out(name, client, command, packs) for command in wire.decode_commands(message)]
        client.forget_late()
        return wire.encode(wire.Reply(answers, client.drain()))

    def _carry_out(self, name: str, client: Client, command: wire.Command, packs: list[Any]) -> wire.Answer:
        if isinstance(command, wire.Ask):
            self._ask(client, command.count)
            return None
        ticket = client.tickets.get(command.ticket)
        if ticket is None:  # forgotten long after its end
            return "ended" if isinstance(command, wire.Finish) else False
        try:
            return self._tell(name, client, ticket, command, packs)
        except Exception as error:  # it belongs to the one who sent this command, who gets it
            return wire.refusal(error)

    def _tell(
        self, name: str, client: Client, ticket: Ticket, command: wire.Command, packs: list[Any]
    ) -> wire.Answer:
        match command:
            case wire.Stamp():
                ticket.stamp(command.version)
                return None
            case wire.Finish():
                ref = packs[command.pack] if command.pack >= 0 else None
                answer: wire.Answer = ticket.finish(Stored(ref, command.item, name, command.length), command.reward)
            case wire.Lose():
                answer = ticket.fail(command.error) if command.failed else ticket.cancel()
            case _:
                self._buf.core.withdraw(ticket)
                answer = None
        if ticket.state in ("finished", "returned"):
            del client.tickets[ticket.id]
        return answer

    def _ask(self, client: Client, count: int) -> None:
        try:
            while count and (ticket := self._buf.next_ticket_nowait()) is not None:
                client.granted(ticket)
                count -= 1
        except Closed as end:
            client.over(end)
            return
        for _ in range(count):
            waiter = self._buf.line_up()
            client.asking.add(waiter)
            waiter.add_done_callback(lambda waiter: self._turn(client, waiter))

    def _turn(self, client: Client, waiter: asyncio.Future[Ticket | None]) -> None:
        """It is the turn of a client that waited."""
        client.asking.discard(waiter)
        if client.gone:  # then it has left the line
            return
        if (ticket := waiter.result()) is None:
            self._ask(client, 1)
        else:
            client.granted(ticket)

    async def events(self, name: str) -> bytes:
        """What happens for a client, as soon as something does, or after a third of the lease."""
        client = self._client(name)
        try:
            async with asyncio.timeout(self._lease / 3):
                while not client.news.is_set():  # a reply may have carried the news off since the wait was over
                    await client.news.wait()
        except TimeoutError:
            pass
        return wire.encode(client.drain())

    async def lend(
        self, name: str, loan: int, timeout: float | None, take: dict[str, Any]
    ) -> tuple[bytes, list[Any]] | Exception | None:
        """A batch, which the client must pin and confirm, or else give back; or the error that it must raise.

        None when the client was given up meanwhile, and must ask again.
        """
        client = self._client(name)
        core = self._buf.core
        client.borrowing[loan] = asyncio.current_task()  # type: ignore[assignment]
        try:
            batch = await self._buf.wait_for_batch(timeout, lambda: core.take_batch(lend=True, **take))
        except (SampleBufferError, TimeoutError) as error:
            return error
        except asyncio.CancelledError:
            return None
        finally:
            del client.borrowing[loan]
        client.loans[loan] = batch
        references = References()
        return references.encode(batch), references.refs

    async def pin(self, name: str, loan: int) -> bool:
        """The batch arrived. Whether it is still this client's; if so, only this client can give it back now."""
        client = self._client(name)
        if loan in client.loans:
            client.pinned.add(loan)
        return loan in client.loans

    async def confirm(self, name: str, loan: int) -> None:
        """The batch is with its consumer."""
        client = self._client(name)
        client.pinned.discard(loan)
        if (batch := client.loans.pop(loan, None)) is not None:
            confirm(self._buf.core, batch)

    async def reclaim(self, name: str, loan: int, lost: list[int]) -> None:
        """The batch did not arrive, or is not wanted any more; the payloads of the tickets `lost` are gone."""
        client = self._client(name)
        if (task := client.borrowing.get(loan)) is not None:
            task.cancel()
        elif (batch := client.loans.pop(loan, None)) is not None:
            client.pinned.discard(loan)
            reclaim(self._buf.core, batch, lost)

    async def drop(self, lost: list[int]) -> None:
        """The payloads of these tickets are gone."""
        drop(self._buf.core, lost)

    async def advance(self, version: int) -> list[wire.TicketInfo] | Exception:
        """As `SampleBuffer.advance`; an error as a value."""
        try:
            return [info(ticket) for ticket in self._buf.advance(version)]
        except SampleBufferError as error:
            return error

    async def cancel_spares(self) -> list[wire.TicketInfo]:
        """As `SampleBuffer.cancel_spares`."""
        return [info(ticket) for ticket in self._buf.cancel_spares()]

    async def wake(self) -> None:
        """As `SampleBuffer.wake`."""
        self._buf.wake()

    async def close(self) -> None:
        """As `SampleBuffer.close`."""
        self._buf.close()

    async def stats(self) -> Stats:
        """As `SampleBuffer.stats`."""
        return self._buf.stats()

    async def save(self) -> tuple[dict[str, Any], list[Any]]:
        """The state with payloads by number, and the objects that hold them."""
        references = References()
        return self._buf.state_dict(references), references.refs

    async def leave(self, name: str, error: str = "") -> None:
        """A client goes: its tickets come back, its batches too. With an error, its payloads are gone as well."""
        client = self._clients.pop(name, None)
        if client is None:
            return
        client.gone = True
        for waiter in client.asking:
            self._buf.leave_line(waiter)
        for task in client.borrowing.values():
            task.cancel()
        for ticket in list(client.tickets.values()):
            ticket.fail(error) if error else ticket.cancel()
        core = self._buf.core
        lost = [s.ticket_id for g in core.groups.values() for s in g.done if error and s.payload.client == name]
        for loan, batch in client.loans.items():
            if loan in client.pinned:
                confirm(core, batch)
            else:
                reclaim(core, batch, lost)
        drop(core, lost)

    def _client(self, name: str) -> Client:
        if self._watch is None:
            self._watch = asyncio.get_running_loop().create_task(self._watch_clients())
        if (client := self._clients.get(name)) is None:
            self._joined += 1
            client = self._clients[name] = Client(self._joined)
        client.seen = asyncio.get_running_loop().time()
        return client

    async def _watch_clients(self) -> None:
        """Runs as long as the actor; wakes by the clock, because silence is no event."""
        while True:
            await asyncio.sleep(self._lease / 3)
            now = asyncio.get_running_loop().time()
            for name in [name for name, client in self._clients.items() if now - client.seen > self._lease]:
                log.warning("client %s was not heard of for %g s; its tickets fail", name, self._lease)
                await self.leave(name, "client lost")


def info(ticket: Ticket) -> wire.TicketInfo:
    """The ticket as a value."""
    return wire.TicketInfo(ticket.id, ticket.key, ticket.group_id, ticket.member, ticket.issued_version)


def length(payload: Stored) -> int | None:
    """What the client measured."""
    return payload.length
