"""The manager: a process's hand on the shared pools.

Invariant (tests: `test_resmgr_model.py`, `test_resmgr_failover.py`): no amount is granted twice, and what a binding
held returns once, whoever dies when: every change is one call of the store's functions, repeated safely under the
same id.
"""

import asyncio
import logging
import math
import os
import uuid
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec

from resmgr import wire
from resmgr.amounts import is_number
from resmgr.asking import wants_all, wants_amount, wants_one
from resmgr.errors import BindingBusy, BindTimeout, Closed, Invalid, StaleBinding, StoreUnavailable
from resmgr.events import watch
from resmgr.holdings import Held, Holdings, OnRebind
from resmgr.refusals import mismatch, stale
from resmgr.session import Session, SessionEnded
from resmgr.status import Status, read_status
from resmgr.store import Store
from resmgr.values import (
    MOST_FRACTIONS,
    MOST_NAMES,
    Binding,
    Event,
    Pool,
    Request,
    check_labels,
    check_name,
    check_timeout,
)
from resmgr.waiting import GROWS, Waiting

log = logging.getLogger("resmgr")

# Of requests in one `bind_all`: each is an argument of one call, of which the server's Lua takes a few thousand.
MOST_PARTS = 1000
LONGEST_S = 1_000_000


def _check_asked(requests: Sequence[Request], timeout: float | None, on_rebind: OnRebind | None) -> None:
    for request in requests:
        if not isinstance(request, Request):
            raise Invalid(f"a binding is asked for by a Request, not by {request!r}")
        request.validate()
    classes = {name for request in requests for name in (*request.prefer, *request.fallback)}
    if len(classes) > MOST_NAMES or sum(request.fractions for request in requests) > MOST_FRACTIONS:
        raise Invalid(f"ask for at most {MOST_NAMES} classes and {MOST_FRACTIONS} fractions at once")
    check_timeout(timeout)
    if on_rebind is not None and not callable(on_rebind):
        raise Invalid(f"on_rebind={on_rebind!r} must be a function of the lost binding and the new one")


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
        self._process = os.getpid()
        self._store = store
        self._session = Session(store, ttl, settle, self._hear, self._on_renewed)
        self._pools: dict[str, Pool] = {}
        self._group = asyncio.TaskGroup()
        self._waiting = Waiting(store, self._session, self._check_open, self._spawn)
        self._holdings = Holdings(store, self._session, self._waiting, self._group.create_task)
        self._runner: asyncio.Task[None] | None = None
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
        for field, value, least in (("ttl", ttl, 0.01), ("settle", settle, 0.0), ("io_timeout", io_timeout, 0.001)):
            if value is not None and not (is_number(value) and least <= value <= LONGEST_S):
                raise Invalid(f"{field}={value!r} must be {least} to {LONGEST_S} s")
        if not (is_number(patience) and patience >= 0):
            raise Invalid(f"patience={patience!r} must be at least 0 s; inf goes on for ever")
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
        return self._holdings.bindings()

    def stats(self) -> Stats:
        return Stats(
            held=len(self._holdings),
            waiting=len(self._waiting),
            rebinding=self._holdings.rebinding,
            beats=self._session.beats,
            lost=self._holdings.lost,
            sessions=self._sessions,
        )

    async def close(self) -> None:
        """Releases all bindings and leaves; waiting calls get `Closed`. Without a store the lease ends by itself."""
        runner, self._runner = self._runner, None
        if runner is None or os.getpid() != self._process:
            return
        runner.cancel()
        await asyncio.wait([runner])
        try:
            owned = wire.encode(list(self._holdings.bindings()))
            await self._store.call("bye", await self._session.ready(), owned, patience=0)
        except StoreUnavailable as error:
            log.warning("closed without the store: %s", error)
        self._holdings.clear()
        await self._store.close()

    # --- pools

    async def register(self, pool: Pool, *, replace: bool = False) -> None:
        """Adds a pool; the same definition again is nothing new, another one needs `replace`.

        A replaced pool keeps the bindings that still fit; the others are lost and asked for again by their owners.
        """
        if not isinstance(pool, Pool):
            raise Invalid(f"register takes a Pool, not {pool!r}")
        pool.validate()
        await self._register(pool, "replace" if replace else "new")
        self._pools[pool.name] = pool

    async def _register(self, pool: Pool, mode: str, patience: float | None = None) -> None:
        definition, places = wire.pool_bytes(pool)
        self._check_open()
        args = (pool.name, definition, pool.hardware, places, mode)
        answer = await self._store.call("register", *args, patience=patience)
        if answer[0] == b"mismatch":
            raise mismatch(wire.decode_pool(answer[1]), pool)

    # --- bindings

    async def bind(
        self, request: Request, timeout: float | None = None, on_rebind: OnRebind | None = None
    ) -> Binding:
        """Waits in the queue until the request is granted; `BindTimeout` after `timeout` seconds (0: does not wait).

        `on_rebind(lost, new)` is called when the binding was lost and granted again; `new` is None if no class could
        hold it any more.
        """
        _check_asked([request], timeout, on_rebind)
        (binding,) = await self._waiting.acquire(wants_one(self._store, request, timeout))
        self._holdings.keep(Held(binding, request, on_rebind))
        return binding

    async def bind_all(
        self, requests: Sequence[Request], timeout: float | None = None, on_rebind: OnRebind | None = None
    ) -> list[Binding]:
        """A gang over several requests: all are granted in one step, each on a class of its own order, or none is.

        An earlier request gets a better class before a later one, but never so that the later one finds no place.
        They wait in the queue as one, with the highest of their priorities. Afterwards each is a binding of its own.
        """
        if not isinstance(requests, Sequence) or not 0 < len(requests) <= MOST_PARTS:
            raise Invalid(f"bind_all takes a list of 1 to {MOST_PARTS} requests, not {requests!r:.200}")
        _check_asked(requests, timeout, on_rebind)
        bindings = await self._waiting.acquire(wants_all(self._store, requests, timeout))
        for binding, request in zip(bindings, requests, strict=True):
            self._holdings.keep(Held(binding, request, on_rebind))
        return bindings

    async def release(self, binding: Binding) -> None:
        """Gives a binding up; one that is being granted again after a loss is asked for no longer."""
        self._check_open()
        await self._holdings.release(binding)

    async def reconfigure(
        self, binding: Binding, amount: float, timeout: float | None = None, leave: str = ""
    ) -> Binding:
        """Changes the amount under the same token. Growth stays on the binding's class and may wait like a bind; what
        is given up is first that on the node `leave`, then what was taken last.
        """
        if leave:
            check_name("leave", leave)
        held = self._holdings.of(binding)
        if held is None:
            await self.check(binding)
            raise StaleBinding(f"binding {binding.id} is owned by another manager; reconfigure it there")
        if binding.id + GROWS in self._waiting:
            raise BindingBusy(f"binding {binding.id} still waits to grow; cancel that reconfigure first")
        request = msgspec.structs.replace(held.request, amount=amount, min_amount=None)
        request.validate()
        check_timeout(timeout)
        (new,) = await self._waiting.acquire(wants_amount(self._store, held.binding, request, timeout, leave))
        if new.amount != amount:
            raise BindTimeout(f"amount={amount} of {binding.hardware} did not become free within {timeout} s")
        held.binding, held.request = new, request
        return new

    async def move_back(self, binding: Binding) -> Binding | None:
        """Takes the preferred class for a binding that fell back; None when its room is gone again.

        The result is a second binding with an id of its own: start there, then release the first.
        """
        held = self._holdings.of(binding)
        if held is None:
            await self.check(binding)
            raise StaleBinding(f"binding {binding.id} is owned by another manager; move it there")
        key = uuid.uuid4().hex
        try:
            answer = await self._in_session("move_back", binding.id, str(binding.token), key)
        except (asyncio.CancelledError, StoreUnavailable):
            self._waiting.hand_on(key, [key])
            raise
        if answer[0] == b"stale":
            raise stale(binding, answer)
        if answer[0] == b"busy":
            return None
        (new,) = wire.bindings_of([key], answer[1])
        self._holdings.keep(Held(new, held.request, held.on_rebind))
        return new

    async def hold(self, binding: Binding) -> Binding:
        """Puts a binding under this manager's lease: for the process that runs on it, when another one owns it.

        If this process dies, the binding is lost and its owner asks for it again.
        """
        answer = await self._in_session("hold", binding.id, str(binding.token))
        if answer[0] == b"stale":
            raise stale(binding, answer)
        (held,) = wire.bindings_of([binding.id], answer[1])
        return held

    async def check(self, binding: Binding) -> None:
        """`StaleBinding` unless the binding is still granted under its token."""
        await self._annotate(binding, b"")

    async def annotate(self, binding: Binding, note: Mapping[str, str]) -> None:
        """Writes a note beside the binding (an address, a rank), for others to read in `status` while it lasts."""
        check_labels("note", note)
        await self._annotate(binding, wire.encode(note))

    async def _annotate(self, binding: Binding, note: bytes) -> None:
        answer = await self._call("annotate", binding.id, str(binding.token), note)
        if answer[0] == b"stale":
            raise stale(binding, answer)

    # --- reading

    async def watch(self, since: int | None = None) -> AsyncIterator[Event]:
        """Yields events after id `since`, or from now on; `EventsLost` where the next one is no longer kept."""
        self._check_open()
        if since is not None and (not isinstance(since, int) or since < 0):
            raise Invalid(f"since={since!r} must be the id of an event, 0 for all that are kept, or None")
        async for event in watch(self._store, since):
            yield event

    async def status(self) -> Status:
        """Pools, bindings, queue and leases at one instant."""
        return read_status(await self._call("snapshot"))

    # --- the session's side

    async def _run(self) -> None:
        """Owns the session and every task that asks again or hands on; its end ends all waits."""
        try:
            async with self._group:
                await self._session.run()
        except* Closed:
            pass  # what asked again, or restored, found the manager being closed
        except* Exception:
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

    def _hear(self, kind: str, key: str, body: bytes) -> None:
        self._holdings.hear(kind, key, body)

    def _on_renewed(self) -> None:
        """All that stood under the last session is gone: waits ask again, pools and bindings are asked for again."""
        self._sessions += 1
        self._waiting.end_all(SessionEnded())
        self._group.create_task(self._restore())

    async def _restore(self) -> None:
        for pool in list(self._pools.values()):
            await self._register(pool, "missing", math.inf)
        await self._holdings.restore()

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
        if os.getpid() != self._process:
            raise Closed(
                "this manager belongs to the process that this one was forked from; connect another one here"
            )
        if self._runner.done():
            raise Closed("this manager's lease task failed; see the log, then connect another one")
