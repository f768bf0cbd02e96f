"""What one manager has bound, and how it gets back what it loses.

Invariant (tests: `test_resmgr_model.py`, `test_resmgr_failover.py`): a binding that is lost is asked for again under
the same id, ahead of newcomers, until it is granted or released, or no class could hold it for two TTLs; one that is
given up is never asked for again, and goes as soon as the store answers, whether or not its caller still waits.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from resmgr import wire
from resmgr.asking import wants_again
from resmgr.errors import Infeasible, Invalid, StaleBinding, StoreUnavailable
from resmgr.refusals import stale
from resmgr.session import Session
from resmgr.store import Store
from resmgr.values import Binding, Request
from resmgr.waiting import GROWS, Waiting

log = logging.getLogger("resmgr")

OnRebind = Callable[[Binding, Binding | None], None]


class Held(msgspec.Struct):
    """A binding with all that is needed to ask for it again."""

    binding: Binding
    request: Request
    on_rebind: OnRebind | None
    leaving: bool = False


class Holdings:
    """`create_task` owns the tasks that ask again."""

    def __init__(
        self,
        store: Store,
        session: Session,
        waiting: Waiting,
        create_task: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self.lost = 0
        self._store = store
        self._session = session
        self._waiting = waiting
        self._create_task = create_task
        waiting.on_changed = self._changed
        self._held: dict[str, Held] = {}
        self._rebinding: dict[str, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._held)

    @property
    def rebinding(self) -> int:
        return len(self._rebinding)

    def bindings(self) -> dict[str, Binding]:
        return {key: held.binding for key, held in self._held.items()}

    def of(self, binding: Binding) -> Held | None:
        """What is held under the binding's own token. Raises Invalid for what is no binding."""
        if not isinstance(binding, Binding):
            raise Invalid(f"give a Binding, as bind returns it, not {binding!r:.200}")
        held = self._held.get(binding.id)
        return held if held is not None and held.binding.token == binding.token else None

    def keep(self, held: Held) -> None:
        """Remembers a grant; its loss may have been heard of before the grant itself."""
        self._held[held.binding.id] = held
        if self._waiting.was_lost(held.binding):
            self._ask_again(held)

    def clear(self) -> None:
        self._held.clear()

    async def release(self, binding: Binding) -> None:
        held = self.of(binding)
        if held is None:
            await self._release(binding)
            return
        rebinding = self._rebinding.pop(binding.id, None)
        if rebinding is not None:
            del self._held[binding.id]
            rebinding.cancel()
            await asyncio.wait([rebinding])
            return
        again, held.leaving = held.leaving, True
        try:
            await self._give_up(held, again)
        except (asyncio.CancelledError, StoreUnavailable):
            if not again:
                self._waiting.spawn(self._give_up(held, True, math.inf))
            raise

    async def _give_up(self, held: Held, again: bool, patience: float | None = None) -> None:
        try:
            await self._release(held.binding, again, patience)
        except StaleBinding:
            self._forget(held)
            raise
        self._forget(held)

    def _forget(self, held: Held) -> None:
        if self._held.get(held.binding.id) is held:
            del self._held[held.binding.id]

    async def _release(self, binding: Binding, again: bool = False, patience: float | None = None) -> None:
        args = ("release", binding.id, str(binding.token), "0")
        answer, repeated = await self._store.call_counted(*args, patience=patience)
        if answer[0] == b"stale" and not (repeated or again):
            raise stale(binding, answer)

    def hear(self, kind: str, key: str, body: bytes) -> None:
        """What the store did on its own: it granted what waited, or took a binding away."""
        held = self._held.get(key.removesuffix(GROWS))
        if kind == "granted":
            if not self._waiting.grant(key, body) and held is not None:
                self._changed(held.binding.id, body)  # grown, for a caller that is gone
        elif kind == "ended":
            self._waiting.end(key, StaleBinding(f"binding {key.removesuffix(GROWS)} ended while it waited to grow"))
        elif held is not None and held.binding.token == int(body):
            self._ask_again(held)
        else:
            self._waiting.lose(key, int(body))

    def _changed(self, key: str, packed: bytes) -> None:
        held = self._held.get(key)
        (now,) = wire.bindings_of([key], packed)
        if held is not None and held.binding.token == now.token:
            held.binding = now

    async def restore(self) -> None:
        """Asks again for all that stood under an earlier session."""
        session = await self._session.ready()
        for key, held in list(self._held.items()):
            if key not in self._rebinding and held.binding.owner != session:
                self._ask_again(held)

    def _ask_again(self, held: Held) -> None:
        if held.leaving:  # its owner is giving it up: so it has
            self._held.pop(held.binding.id, None)
            return
        log.warning("binding %s (%s on %s) was lost", held.binding.id, held.binding.role, held.binding.hardware)
        lost = StaleBinding(f"binding {held.binding.id} was lost while it waited to grow")
        self._waiting.end(held.binding.id + GROWS, lost)
        self._rebinding[held.binding.id] = self._create_task(self._rebind(held))

    async def _rebind(self, held: Held) -> None:
        lost = held.binding
        amount = min(lost.amount, held.request.amount)
        request = msgspec.structs.replace(held.request, amount=amount)
        try:
            new = await self._acquire_again(lost, request)
        except Infeasible as error:
            log.error("binding %s (%s) cannot be granted again: %s", lost.id, lost.role, error)
            self._held.pop(lost.id, None)
            new = None
        finally:
            self._rebinding.pop(lost.id, None)
        if new is not None:
            held.binding = new
            self.keep(held)
        if new is None or new.token != lost.token:
            self.lost += 1
            if held.on_rebind is not None:
                asyncio.get_running_loop().call_soon(held.on_rebind, lost, new)

    async def _acquire_again(self, lost: Binding, request: Request) -> Binding:
        """For two TTLs a class that is gone may come back: with its node, or with the manager that registers it."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + 2 * self._session.ttl
        while True:
            try:
                (new,) = await self._waiting.acquire(wants_again(self._store, lost, request))
                return new
            except Infeasible:
                if loop.time() > deadline:
                    raise
            await asyncio.sleep(self._session.ttl / 3)
