"""The manager: a process's hand on the shared pools.

Invariants (tests: `test_resmgr_model.py`, `test_resmgr_failover.py`):
- No amount is granted twice, and what a binding held returns once, whoever dies when: every change is one call of the
  store's functions, repeated safely under the same id.
- A binding that is lost is asked for again under the same id, ahead of newcomers, until it is granted or released.
"""

import asyncio
import logging
import math
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from types import TracebackType
from typing import Any, Self

import msgspec

from resmgr import wire
from resmgr.amounts import to_milli
from resmgr.errors import BindingBusy, BindTimeout, Closed, Infeasible, PoolMismatch, StaleBinding, StoreUnavailable
from resmgr.events import watch
from resmgr.refusals import stale
from resmgr.session import Session, SessionEnded
from resmgr.status import Status, read_status
from resmgr.store import Store
from resmgr.values import Binding, Event, Pool, Request
from resmgr.waiting import Ask, Waiting

log = logging.getLogger("resmgr")

OnRebind = Callable[[Binding, Binding | None], None]


class _Held(msgspec.Struct):
    binding: Binding
    request: Request
    on_rebind: OnRebind | None
    leaving: bool = False


class Stats(msgspec.Struct, frozen=True):
    """Counts of one manager since it connected."""

    held: int
    waiting: int
    rebinding: int
    beats: int
    lost: int
    sessions: int


class ResourceManager:
    """Made by `connect`; ended by `close`, which releases all it bound."""

    def __init__(self, store: Store, ttl: float | None, settle: float | None) -> None:
        self._store = store
        self._session = Session(store, ttl, settle, self._on_message, self._on_renewed)
        self._held: dict[str, _Held] = {}
        self._rebinding: dict[str, asyncio.Task[None]] = {}
        self._pools: dict[str, Pool] = {}
        self._group = asyncio.TaskGroup()
        self._waiting = Waiting(store, self._session, self._check_open, self._spawn)
        self._runner: asyncio.Task[None] | None = None
        self._lost = 0
        self._sessions = 1

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        ttl: float | None = None,
        settle: float | None = None,
        namespace: str = "resmgr",
        patience: float = 30.0,
        io_timeout: float = 5.0,
    ) -> Self:
        """Joins the store at `url` (redis://, rediss://, unix:// or embedded:DIR[?persist=1]).

        `ttl` seconds without a heartbeat end a lease; all managers of a store share it (default: the store's,
        else 10). `settle` seconds must a preferred class have had room before a move is offered (default: the
        TTL). Calls go on trying for `patience` seconds while the store is away; `io_timeout` bounds each try.
        """
        store = Store(url, namespace, patience, io_timeout)
        manager = cls(store, ttl, settle)
        try:
            await store.open()
            await manager._session.begin()
            if store.server:
                await manager._session.bury_the_dead()
        except BaseException:
            await store.close()
            raise
        manager._runner = asyncio.create_task(manager._run(), name="resmgr-session")
        return manager

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def ttl(self) -> float:
        return self._session.ttl

    @property
    def bindings(self) -> dict[str, Binding]:
        """What this manager bound and has not released, by id; a lost one stays until it is granted again."""
        return {key: held.binding for key, held in self._held.items()}

    def stats(self) -> Stats:
        return Stats(
            held=len(self._held),
            waiting=len(self._waiting),
            rebinding=len(self._rebinding),
            beats=self._session.beats,
            lost=self._lost,
            sessions=self._sessions,
        )

    async def close(self) -> None:
        """Releases all bindings and leaves; waiting calls get `Closed`. Without a store the lease ends by itself."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        runner.cancel()
        await asyncio.wait([runner])
        try:
            owned = wire.encode(list(self._held))
            await self._store.call("bye", await self._session.ready(), owned, patience=0)
        except StoreUnavailable as error:
            log.warning("closed without the store: %s", error)
        self._held.clear()
        await self._store.close()

    # --- pools

    async def register(self, pool: Pool, *, replace: bool = False) -> None:
        """Adds a pool; the same definition again is nothing new, another one needs `replace`.

        A replaced pool keeps the bindings that still fit; the others are lost and asked for again by their owners.
        """
        pool.validate()
        await self._register(pool, "replace" if replace else "new")
        self._pools[pool.name] = pool

    async def _register(self, pool: Pool, mode: str, patience: float | None = None) -> None:
        definition, places = wire.pool_bytes(pool)
        self._check_open()
        args = (pool.name, definition, pool.hardware, places, mode)
        answer = await self._store.call("register", *args, patience=patience)
        if answer[0] == b"mismatch":
            raise PoolMismatch(
                f"pool {pool.name!r} is registered as {wire.decode_pool(answer[1])}, not as {pool}; "
                "use another name, or register(pool, replace=True)"
            )

    # --- bindings

    async def bind(
        self, request: Request, timeout: float | None = None, on_rebind: OnRebind | None = None
    ) -> Binding:
        """Waits in the queue until the request is granted; `BindTimeout` after `timeout` seconds (0: does not wait).

        `on_rebind(lost, new)` is called when the binding was lost and granted again; `new` is None if no class could
        hold it any more.
        """
        request.validate()
        key = uuid.uuid4().hex
        binding = await self._waiting.acquire(key, key, self._ask_bind(key, request, timeout, None), timeout, request)
        self._keep(_Held(binding, request, on_rebind))
        return binding

    async def release(self, binding: Binding) -> None:
        """Gives a binding up; one that is being granted again after a loss is asked for no longer."""
        self._check_open()
        held = self._held.get(binding.id)
        if held is not None and held.binding.token == binding.token:
            await self._release_own(held)
        else:
            await self._release(binding)

    async def _release_own(self, held: _Held) -> None:
        key = held.binding.id
        rebinding = self._rebinding.get(key)
        if rebinding is not None:
            rebinding.cancel()
            await asyncio.wait([rebinding])
            self._rebinding.pop(key, None)  # it may have been cancelled before its first step
            self._held.pop(key, None)
            return
        held.leaving = True
        try:
            await self._release(held.binding)
        except StaleBinding:
            self._held.pop(key, None)
            raise
        except BaseException:
            held.leaving = False  # unless it was lost meanwhile, it is still ours
            raise
        self._held.pop(key, None)

    async def _release(self, binding: Binding) -> None:
        answer, repeated = await self._store.call_counted("release", binding.id, str(binding.token), "0")
        if answer[0] == b"stale" and not repeated:
            raise stale(binding, answer)

    async def reconfigure(self, binding: Binding, amount: float, timeout: float | None = None) -> Binding:
        """Changes the amount under the same token. Growth stays on the binding's class and may wait like a bind."""
        held = self._held.get(binding.id)
        if held is None or held.binding.token != binding.token:
            await self.check(binding)
            raise StaleBinding(f"binding {binding.id} is owned by another manager; reconfigure it there")
        if binding.id + "+" in self._waiting:
            raise BindingBusy(f"binding {binding.id} still waits to grow; cancel that reconfigure first")
        request = msgspec.structs.replace(held.request, amount=amount, min_amount=None)
        request.validate()
        ask = self._ask_reconfigure(held.binding, request, timeout)
        new = await self._waiting.acquire(binding.id + "+", binding.id, ask, timeout, request)
        if new.amount != amount:
            raise BindTimeout(f"amount={amount} of {binding.hardware} did not become free within {timeout} s")
        held.binding, held.request = new, request
        return new

    async def move_back(self, binding: Binding) -> Binding | None:
        """Takes the preferred class for a binding that fell back; None when its room is gone again.

        The result is a second binding with an id of its own: start there, then release the first.
        """
        held = self._held.get(binding.id)
        if held is None:
            await self.check(binding)
            raise StaleBinding(f"binding {binding.id} is owned by another manager; move it there")
        key = uuid.uuid4().hex
        try:
            answer = await self._in_session("move_back", binding.id, str(binding.token), key)
        except (asyncio.CancelledError, StoreUnavailable):
            self._waiting.hand_on(key, key)
            raise
        if answer[0] == b"stale":
            raise stale(binding, answer)
        if answer[0] == b"busy":
            return None
        new = wire.binding_of(key, answer[1])
        self._keep(_Held(new, held.request, held.on_rebind))
        return new

    async def hold(self, binding: Binding) -> Binding:
        """Puts a binding under this manager's lease: for the process that runs on it, when another one owns it.

        If this process dies, the binding is lost and its owner asks for it again.
        """
        answer = await self._in_session("hold", binding.id, str(binding.token))
        if answer[0] == b"stale":
            raise stale(binding, answer)
        return wire.binding_of(binding.id, answer[1])

    async def check(self, binding: Binding) -> None:
        """`StaleBinding` unless the binding is still granted under its token."""
        await self._annotate(binding, b"")

    async def annotate(self, binding: Binding, note: Mapping[str, str]) -> None:
        """Writes a note beside the binding (an address, a rank), for others to read in `status` while it lasts."""
        await self._annotate(binding, wire.encode(note))

    async def _annotate(self, binding: Binding, note: bytes) -> None:
        answer = await self._call("annotate", binding.id, str(binding.token), note)
        if answer[0] == b"stale":
            raise stale(binding, answer)

    # --- reading

    async def watch(self, since: int | None = None) -> AsyncIterator[Event]:
        """Yields events after id `since`, or from now on; `EventsLost` where the next one is no longer kept."""
        self._check_open()
        async for event in watch(self._store, since):
            yield event

    async def status(self) -> Status:
        """Pools, bindings, queue and leases at one instant."""
        return read_status(await self._call("snapshot"))

    # --- asking, waiting, giving up

    def _ask_bind(self, key: str, request: Request, timeout: float | None, lost: Binding | None) -> Ask:
        spec, wait = wire.spec_of(request), "0" if timeout == 0 else "1"
        last = (lost.hardware, wire.whole_places(lost)) if lost else ("", b"")
        patience = math.inf if lost else None
        return lambda session: self._store.call("bind", session, key, spec, wait, *last, patience=patience)

    def _ask_reconfigure(self, binding: Binding, request: Request, timeout: float | None) -> Ask:
        now, then = to_milli("amount", binding.amount), to_milli("Request.amount", request.amount)
        same = msgspec.structs.replace(request, prefer=[binding.hardware], fallback=[])
        spec = wire.spec_of(same, max(then - now, 1))
        args = (binding.id, str(binding.token), now, then, spec, "0" if timeout == 0 else "1")
        return lambda session: self._store.call("reconfigure", session, *args)

    # --- the session's side

    async def _run(self) -> None:
        """Owns the session and every task that asks again or hands on; its end ends all waits."""
        try:
            async with self._group:
                await self._session.run()
        except Exception:
            log.exception("the lease is no longer kept")
            raise
        finally:
            self._session.stop()
            self._waiting.end_all(Closed("the manager was closed, or its lease task failed"))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        if self._runner is None or self._runner.done():
            work.close()  # leaving the store gives everything back
        else:
            self._group.create_task(work)

    def _on_message(self, kind: str, key: str, body: bytes) -> None:
        if kind == "granted":
            held = self._held.get(key.removesuffix("+"))
            if not self._waiting.grant(key, body) and held is not None:
                held.binding = wire.binding_of(held.binding.id, body)  # grown, for a caller that is gone
            return
        held, token = self._held.get(key), int(body)
        if held is not None and held.binding.token == token:
            self._ask_again(held)
        else:
            self._waiting.lose(key, token)

    def _keep(self, held: _Held) -> None:
        """Remembers a grant; its loss may have been heard of before the grant itself."""
        self._held[held.binding.id] = held
        if self._waiting.was_lost(held.binding):
            self._ask_again(held)

    def _on_renewed(self) -> None:
        """All that stood under the last session is gone: waits ask again, pools and bindings are asked for again."""
        self._sessions += 1
        self._waiting.end_all(SessionEnded())
        self._group.create_task(self._restore())

    async def _restore(self) -> None:
        for pool in list(self._pools.values()):
            await self._register(pool, "missing", math.inf)
        for key, held in list(self._held.items()):
            if key not in self._rebinding and held.binding.owner != await self._session.ready():
                self._ask_again(held)

    def _ask_again(self, held: _Held) -> None:
        if held.leaving:  # its owner is giving it up: so it has
            self._held.pop(held.binding.id, None)
            return
        log.warning("binding %s (%s on %s) was lost", held.binding.id, held.binding.role, held.binding.hardware)
        lost = StaleBinding(f"binding {held.binding.id} was lost while it waited to grow")
        self._waiting.end(held.binding.id + "+", lost)
        self._rebinding[held.binding.id] = self._group.create_task(self._rebind(held))

    async def _rebind(self, held: _Held) -> None:
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
            self._keep(held)
        if new is None or new.token != lost.token:
            self._lost += 1
            if held.on_rebind is not None:
                asyncio.get_running_loop().call_soon(held.on_rebind, lost, new)

    async def _acquire_again(self, lost: Binding, request: Request) -> Binding:
        """For two TTLs a class that is gone may come back: with its node, or with the manager that registers it."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + 2 * self.ttl
        ask = self._ask_bind(lost.id, request, None, lost)
        while True:
            try:
                return await self._waiting.acquire(lost.id, lost.id, ask, None, request)
            except Infeasible:
                if loop.time() > deadline:
                    raise
            await asyncio.sleep(self.ttl / 3)

    # --- calls

    async def _call(self, name: str, *args: str | bytes | int) -> list[Any]:
        self._check_open()
        return await self._store.call(name, *args)

    async def _in_session(self, name: str, *args: str | bytes | int) -> list[Any]:
        while True:
            self._check_open()
            session = await self._session.ready()
            self._check_open()
            answer = await self._store.call(name, session, *args)
            if answer[0] != b"session":
                return answer
            self._session.ended(session)

    def _check_open(self) -> None:
        if self._runner is None:
            raise Closed("this manager is closed; connect another one")
        if self._runner.done():
            raise Closed("this manager's lease task failed; see the log, then connect another one")
