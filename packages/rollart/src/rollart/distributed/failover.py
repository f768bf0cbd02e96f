"""A cluster's bindings: what becomes of its workers when a resource is lost, given up, or a better one is offered.

Invariants (tests/rollart/test_rollart_distributed_failover.py, ..._nodes.py):
- when a binding is lost and granted again, the workers whose node is still among its nodes stay as they are, and the
  others are started on the new ones (test_a_lost_binding_moves_only_whom_it_must);
- a worker whose restarts are used up is replaced on another node, and gives its part of the old binding back
  (test_a_worker_that_keeps_dying_is_replaced_elsewhere); while nothing is free elsewhere it stays dead;
- one change at a time, but looking for a replacement holds up nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec

from resmgr import Closed, EventsLost, ResmgrError, StaleBinding, StoreUnavailable
from rollart.distributed.errors import WorkerDied
from rollart.distributed.member import ActorOptions, Member
from rollart.distributed.placement import Resources, Seat, seats_of

log = logging.getLogger("rollart")


class FailoverStats(msgspec.Struct):
    """Bindings that were lost, workers that were replaced elsewhere, and bindings that moved to a better class."""

    lost: int = 0
    replaced: int = 0
    moved: int = 0


class Failover:
    """Made before the workers, so that it hears of every loss; `watch` it once they run, `close` it after them."""

    def __init__(self, resources: Resources, options: ActorOptions) -> None:
        self.stats = FailoverStats()
        self._resources = resources
        self._options = options
        self._requests: dict[str, Any] = {}
        self._bindings: dict[str, Any] = {}
        self._members: Sequence[Member] = ()
        self._one_at_a_time = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def bind(self, requests: Sequence[Any]) -> list[Any]:
        """All requests in one step, or none. Raises what the resource manager raises."""
        bindings = await self._resources.bind_all(requests, self._options.start_timeout, self._on_rebind)
        for binding, request in zip(bindings, requests, strict=True):
            self._bindings[binding.id], self._requests[binding.id] = binding, request
        return bindings

    def watch(self, members: Sequence[Member]) -> None:
        self._members = members
        if self._options.follow_offers:
            self._spawn(self._follow_offers())

    async def close(self) -> None:
        """Gives everything back."""
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        ends = await asyncio.gather(*map(self._return, list(self._bindings.values())), return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException):
                raise end

    async def elsewhere(self, member: Member) -> Seat | None:
        """Another resource for a worker that could not be kept alive where it is; None when there is none.

        While it waits for one, losses are dealt with; should they move the worker, it is cancelled.
        """
        old = self._bindings.get(member.info.binding)
        if old is None:
            return None
        request = _apart_from(self._requests[old.id], member.info.node, self._share(old))
        try:
            new = await self._resources.bind(request, self._options.start_timeout, self._on_rebind)
        except ResmgrError as error:
            log.error("%s stays dead: %s", member.info.name, error)
            return None
        self._bindings[new.id], self._requests[new.id] = new, request
        try:
            async with self._one_at_a_time:
                await self._give_up(member, request.amount)
        except asyncio.CancelledError:
            self._spawn(self._return(new))
            raise
        self.stats.replaced += 1
        return seats_of(new, 1)[0]

    def _share(self, binding: Any) -> float:
        """What each worker on the binding has of it."""
        return float(binding.amount) / len(self._on(binding.id))

    def _on(self, binding: str) -> list[Member]:
        return [member for member in self._members if member.info.binding == binding]

    async def _give_up(self, member: Member, share: float) -> None:
        """Returns a worker's part of its old binding; one that was lost meanwhile is cut when it is granted again."""
        old, node = self._bindings[member.info.binding], member.info.node
        try:
            if share >= old.amount:
                await self._return(old)
            else:
                request = self._requests[old.id]
                self._requests[old.id] = msgspec.structs.replace(request, amount=old.amount - share, min_amount=None)
                self._bindings[old.id] = await self._resources.reconfigure(old, old.amount - share, leave=node)
        except StaleBinding as error:
            log.info("%s had been lost: %s", old.id, error)
            if old.id in self._bindings:
                self._bindings[old.id] = msgspec.structs.replace(old, amount=old.amount - share)

    async def _return(self, binding: Any) -> None:
        try:
            await self._resources.release(binding)
        except (StaleBinding, Closed, StoreUnavailable) as error:  # a closed manager has given all back, a lease ends
            log.info("nothing to give back: %s", error)
        self._forget(binding.id)

    def _forget(self, binding: str) -> None:
        self._bindings.pop(binding, None)
        self._requests.pop(binding, None)

    def _on_rebind(self, lost: Any, new: Any) -> None:
        if lost.id in self._bindings:
            self.stats.lost += 1
            self._spawn(self._reseat(lost, new))

    async def _reseat(self, lost: Any, new: Any) -> None:
        async with self._one_at_a_time:
            members = [member for member in self._on(lost.id) if not member.ended]
            if new is None:
                self._forget(lost.id)
                for member in members:
                    await member.give_up("its resource was lost, and no class could hold it any more")
                return
            self._bindings[new.id] = new
            wanted = self._requests[new.id].amount
            if new.amount > wanted:
                new = self._bindings[new.id] = await self._resources.reconfigure(new, wanted)
            await self._seat(members, new)

    async def _seat(self, members: Sequence[Member], binding: Any, drain: bool = False) -> None:
        """Members whose node is one of the binding's stay there, the others take what is left."""
        free = seats_of(binding, len(members))
        moving = []
        for member in members:
            here = next((seat for seat in free if _is_at(member, seat)), None)
            if here is None:
                moving.append(member)
            else:
                free.remove(here)
                member.stay(here)
        await asyncio.gather(*(member.move(seat, drain) for member, seat in zip(moving, free, strict=True)))

    async def _follow_offers(self) -> None:
        """Waits for `move_offered`; takes what is offered, and moves the workers when their calls have ended.

        An offer that is missed, with the store or its events, comes again.
        """
        while True:
            try:
                async for event in self._resources.watch():
                    if event.kind == "move_offered" and event.binding in self._bindings:
                        async with self._one_at_a_time:
                            await self._move_back(event.binding)
                return
            except (EventsLost, StoreUnavailable) as error:
                log.warning("offers are missed: %s", error)

    async def _move_back(self, binding: str) -> None:
        old = self._bindings.get(binding)
        try:
            new = old and await self._resources.move_back(old)
        except StaleBinding:
            return  # it was lost meanwhile, and is granted again
        if not new:
            return
        members = self._on(binding)
        self._bindings[new.id], self._requests[new.id] = new, self._requests[binding]
        self.stats.moved += 1
        await self._seat(members, new, drain=True)
        await self._return(old)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the workers of a cluster could not be moved", exc_info=error)
            for member in self._members:
                member.fail(WorkerDied(member.info, f"its resources are no longer followed: {error}", ""))


def _apart_from(request: Any, node: str, share: float) -> Any:
    """The request for one worker's part, on another node."""
    chunk = request.chunk if request.chunk is not None and share % request.chunk == 0 else None
    return msgspec.structs.replace(
        request, amount=share, min_amount=None, chunk=chunk, spread=False, avoid=[*request.avoid, node]
    )


def _is_at(member: Member, seat: Seat) -> bool:
    return (member.info.hardware, member.info.node) == (seat.hardware, seat.node)
