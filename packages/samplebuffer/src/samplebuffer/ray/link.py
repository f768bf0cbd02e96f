"""One process's line to the actor: what many coroutines want and say in few calls, events back.

- The asker sends what coroutines wait for (tickets) at once; while a call is under way the next asks gather.
- The teller sends what they say of their tickets. It waits for the first command, then until `pack_bytes` of payloads
  are there or `linger` seconds have passed, and puts the payloads into Ray's store in packs before it calls. One
  call at a time keeps the order of the commands of a ticket.
- The listener waits for the events of this client, and says by asking that the client is alive.

All end with `close`, or with `BufferLost` when the actor is gone (tests/samplebuffer/test_samplebuffer_ray.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray

from samplebuffer.errors import BufferLost, Closed, SampleBufferError, Unsendable
from samplebuffer.ray import wire
from samplebuffer.ray.pack import packs, weight

NOTHING = object()


class Said:
    """A command about a ticket, its payload if it carries one, and who waits for the answer."""

    __slots__ = ("answer", "command", "payload", "weight")

    def __init__(self, command: wire.Command, payload: Any, answer: asyncio.Future[Any]) -> None:
        self.command = command
        self.payload = payload
        self.answer = answer
        self.weight = 0 if payload is NOTHING else weight(payload)


class Link:
    """Sends asks and commands, and hands on events."""

    def __init__(
        self,
        actor: Any,
        name: str,
        pack_bytes: int,
        linger: float,
        on_events: Callable[[wire.Events], None],
        on_lost: Callable[[SampleBufferError], None],
    ) -> None:
        self._actor = actor
        self._name = name
        self._pack_bytes = pack_bytes
        self._linger = linger
        self._on_events = on_events
        self._on_lost = on_lost
        self._early: dict[tuple[int, int], wire.Events] = {}
        self._expected = (0, 0)
        self._asks: list[wire.Command] = []
        self._asking = False
        self._wanted = asyncio.Event()
        self._said: list[Said] = []
        self._saying: list[Said] = []
        self._gathered = 0
        self._begun, self._full = asyncio.Event(), asyncio.Event()
        self._broken: SampleBufferError | None = None
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._run(step)) for step in (self._ask, self._tell, self._listen)]

    def ask(self, count: int) -> None:
        """Ask for so many more tickets. They come as events."""
        if self._asks and isinstance(last := self._asks[-1], wire.Ask):
            last.count += count
        else:
            self._want(wire.Ask(count))

    def withdraw(self, ticket: int) -> None:
        """Give back a ticket that nobody saw."""
        self._want(wire.Withdraw(ticket))

    def _want(self, command: wire.Command) -> None:
        if self._broken is None:
            self._asks.append(command)
            self._wanted.set()

    def say(self, command: wire.Command, payload: Any = NOTHING) -> asyncio.Future[Any]:
        """Queue a command. The future is its answer, or the error that it met."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._broken is not None:
            answer.set_exception(self._broken)
            return answer
        said = Said(command, payload, answer)
        self._said.append(said)
        self._gathered += said.weight
        self._begun.set()
        if self._gathered >= self._pack_bytes:
            self._full.set()
        return answer

    @property
    def settled(self) -> bool:
        """Whether the event that is being handed on is the newest, and was sent after every ask had arrived."""
        return not self._asks and not self._asking and not self._early

    async def flush(self) -> None:
        """Have all that was said answered, without delay."""
        self._full.set()
        if answers := [said.answer for said in self._saying + self._said]:
            await asyncio.wait(answers)

    async def close(self) -> None:
        """End all loops."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._break(Closed("this client has left"))

    async def _run(self, step: Callable[[], Any]) -> None:
        try:
            while True:
                await step()
        except Exception as error:  # whatever it is, nobody may wait for this link any more
            lost = BufferLost(f"the link to the buffer broke: {type(error).__name__}: {error}")
            self._break(lost)
            self._on_lost(lost)

    async def _listen(self) -> None:
        self._hand_on(wire.decode_events(await self._actor.events.remote(self._name)))

    async def _ask(self) -> None:
        await self._wanted.wait()
        self._wanted.clear()
        asks, self._asks = self._asks, []
        self._asking = True
        reply = await self._exchange(asks, [])
        self._asking = False
        self._hand_on(reply.events)

    async def _tell(self) -> None:
        await self._begun.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._linger):
                await self._full.wait()
        self._begun.clear()
        self._full.clear()
        self._saying, self._said, self._gathered = self._said, [], 0
        carriers = [said for said in self._saying if said.payload is not NOTHING]
        refs: list[Any] = []
        if carriers:
            refs, failed = await asyncio.to_thread(self._put, carriers)
            for said, error in failed:
                self._saying.remove(said)
                if not said.answer.done():
                    said.answer.set_exception(error)
        reply = await self._exchange([said.command for said in self._saying], refs)
        answered, self._saying = self._saying, []
        self._hand_on(reply.events)
        for said, answer in zip(answered, reply.answers, strict=True):
            if said.answer.done():
                continue
            if isinstance(answer, wire.Refusal):
                said.answer.set_exception(answer.to_error())
            else:
                said.answer.set_result(answer)

    async def _exchange(self, commands: list[wire.Command], refs: list[Any]) -> wire.Reply:
        return wire.decode_reply(await self._actor.exchange.remote(self._name, wire.encode(commands), refs))

    def _hand_on(self, events: wire.Events) -> None:
        """Hand events on in the order in which they happened, whichever reply came first."""
        if events.joined < self._expected[0]:
            return  # of a time before the actor gave this client up
        if events.joined > self._expected[0]:
            self._expected = (events.joined, 0)
            self._early.clear()
        self._early[events.joined, events.number] = events
        while (following := self._early.pop(self._expected, None)) is not None:
            self._expected = (following.joined, following.number + 1)
            self._on_events(following)

    def _put(self, carriers: list[Said]) -> tuple[list[Any], list[tuple[Said, Unsendable]]]:
        """Put payloads into the store, in packs, and write their places into their commands.

        Runs in a thread of the loop's executor, because Ray's store blocks while it copies.
        """
        refs: list[Any] = []
        failed: list[tuple[Said, Unsendable]] = []
        for cut in packs([said.weight for said in carriers], self._pack_bytes):
            some = carriers[cut]
            try:
                self._put_together(some, refs)
            except Exception:  # one of them can not be serialized: find out which
                for said in some:
                    try:
                        self._put_together([said], refs)
                    except Exception as error:
                        failed.append((said, Unsendable(f"{type(error).__name__}: {error}")))
        return refs, failed

    @staticmethod
    def _put_together(some: list[Said], refs: list[Any]) -> None:
        refs.append(ray.put([said.payload for said in some]))
        for item, said in enumerate(some):
            assert isinstance(said.command, wire.Finish)
            said.command.pack, said.command.item = len(refs) - 1, item

    def _break(self, error: SampleBufferError) -> None:
        self._broken = self._broken or error
        for said in self._saying + self._said:
            if not said.answer.done():
                said.answer.set_exception(error)
        self._saying, self._said, self._asks = [], [], []
