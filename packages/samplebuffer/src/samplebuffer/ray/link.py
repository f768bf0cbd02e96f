"""One process's line to the actor: commands of many coroutines in one call, events back.

- The sender consumes the queue of commands, waits for the first, and sends all there are by then; while a call is
  under way the next commands gather. One call at a time keeps their order.
- The listener waits for the events of this client, and says by asking that the client is alive.

Both end with `close`, or with `BufferLost` when the actor is gone (tests/samplebuffer/test_samplebuffer_ray.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import ray

from samplebuffer.errors import BufferLost, Closed, SampleBufferError, Unsendable
from samplebuffer.ray import wire

Pending = tuple[wire.Command, Any, "asyncio.Future[Any]"]
NOTHING = object()


class Link:
    """Sends commands and hands on events."""

    def __init__(
        self,
        actor: Any,
        name: str,
        chunk: int,
        on_events: Callable[[wire.Events], None],
        on_lost: Callable[[SampleBufferError], None],
    ) -> None:
        self._actor = actor
        self._name = name
        self._chunk = chunk
        self._on_events = on_events
        self._on_lost = on_lost
        self._early: dict[tuple[int, int], wire.Events] = {}
        self._expected = (0, 0)
        self._queue: list[Pending] = []
        self._under_way: list[Pending] = []
        self._broken: SampleBufferError | None = None
        self._filled = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._run(self._send)), loop.create_task(self._run(self._listen))]

    def send(self, command: wire.Command, payload: Any = NOTHING) -> asyncio.Future[Any]:
        """Queue a command. The future is its answer, or the error that it met."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._broken is None:
            self._queue.append((command, payload, answer))
            self._filled.set()
        else:
            answer.set_exception(self._broken)
        return answer

    @property
    def idle(self) -> bool:
        """Whether every command was answered."""
        return not self._queue and not self._under_way

    async def close(self) -> None:
        """End both loops."""
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

    async def _send(self) -> None:
        await self._filled.wait()
        self._filled.clear()
        pending, self._queue = self._queue, []
        self._under_way = pending
        carriers = [entry for entry in pending if entry[1] is not NOTHING]
        refs: list[Any] = []
        if carriers:
            refs, failed = await asyncio.to_thread(self._put, carriers)
            for entry, error in failed:
                entry[2].set_exception(error)
                pending.remove(entry)
        message = wire.encode([command for command, _, _ in pending])
        reply = wire.decode_reply(await self._actor.exchange.remote(self._name, message, refs))
        self._under_way = []
        self._hand_on(reply.events)
        for (_, _, waiter), answer in zip(pending, reply.answers, strict=True):
            if waiter.done():
                continue
            if isinstance(answer, wire.Refusal):
                waiter.set_exception(answer.to_error())
            else:
                waiter.set_result(answer)

    def _hand_on(self, events: wire.Events) -> None:
        """Hand events on in the order in which they happened, whichever reply came first."""
        if events.joined > self._expected[0]:
            self._expected = (events.joined, 0)
            self._early.clear()
        self._early[events.joined, events.number] = events
        while (following := self._early.pop(self._expected, None)) is not None:
            self._expected = (following.joined, following.number + 1)
            self._on_events(following)

    def _put(self, carriers: list[Pending]) -> tuple[list[Any], list[tuple[Pending, Unsendable]]]:
        """Put payloads into the store, `chunk` to an object, and write their places into their commands.

        Runs in a thread of the loop's executor, because Ray's store blocks while it copies.
        """
        refs: list[Any] = []
        failed: list[tuple[Pending, Unsendable]] = []
        for start in range(0, len(carriers), self._chunk):
            some = carriers[start : start + self._chunk]
            try:
                self._put_together(some, refs)
            except Exception:  # one of them can not be serialized: find out which
                for entry in some:
                    try:
                        self._put_together([entry], refs)
                    except Exception as error:
                        failed.append((entry, Unsendable(f"{type(error).__name__}: {error}")))
        return refs, failed

    @staticmethod
    def _put_together(entries: list[Pending], refs: list[Any]) -> None:
        refs.append(ray.put([payload for _, payload, _ in entries]))
        for index, (command, _, _) in enumerate(entries):
            assert isinstance(command, wire.Finish)
            command.chunk, command.index = len(refs) - 1, index

    def _break(self, error: SampleBufferError) -> None:
        self._broken = self._broken or error
        for _, _, waiter in self._under_way + self._queue:
            if not waiter.done():
                waiter.set_exception(error)
        self._under_way, self._queue = [], []
