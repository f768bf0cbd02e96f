"""Asking for something that may have to wait, and giving up on it.

Invariants (tests: `test_resmgr_queue.py`):
- A caller that gives up, by timeout or cancellation, holds nothing: what was granted meanwhile is handed on. The
  store remembers a withdrawal, so that the request it overtook on the way is not granted after it.
- The grant is waited for before it is asked for, so that it cannot be missed.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import msgspec

from resmgr import wire
from resmgr.errors import StoreUnavailable
from resmgr.refusals import refusal, timed_out
from resmgr.session import Session, SessionEnded
from resmgr.store import Store
from resmgr.values import Binding, Request

Ask = Callable[[str], Awaitable[list[Any]]]
GROWS = "+"


class Want(msgspec.Struct, frozen=True):
    """What is asked for under the id `key`: the bindings `targets`, by one request each."""

    key: str
    targets: Sequence[str]
    requests: Sequence[Request]
    ask: Ask
    timeout: float | None


class Waiting:
    """The requests of one manager that have no final answer yet."""

    def __init__(
        self,
        store: Store,
        session: Session,
        check_open: Callable[[], None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._store = store
        self._session = session
        self._check_open = check_open
        self.spawn = spawn
        self._granted: dict[str, asyncio.Future[bytes]] = {}
        self._targets: set[str] = set()
        self._lost: dict[str, int] = {}
        self.on_changed: Callable[[str, bytes], None] = lambda target, packed: None
        """Hears what a binding is now that was changed without its caller having heard of it."""

    def __contains__(self, wait: str) -> bool:
        return wait in self._granted

    def __len__(self) -> int:
        return len(self._granted)

    async def acquire(self, want: Want) -> list[Binding]:
        """Asks, under one session after another, until the answer is final."""
        new = () if want.key.endswith(GROWS) else want.targets
        self._targets.update(new)
        try:
            if want.timeout:
                granted = await self._ask_until(want)
            else:
                granted = await self._ask(want)
        except (asyncio.CancelledError, StoreUnavailable):
            self.hand_on(want.key, want.targets)
            raise
        finally:
            self._granted.pop(want.key, None)
            self._targets.difference_update(new)
        return wire.bindings_of(want.targets, granted)

    async def _ask_until(self, want: Want) -> bytes:
        try:
            async with asyncio.timeout(want.timeout) as limit:
                return await self._ask(want)
        except TimeoutError:
            if not limit.expired():
                raise
            return await self._leave(want)

    async def _ask(self, want: Want) -> bytes:
        while True:
            self._check_open()
            session = await self._session.ready()
            self._check_open()
            granted = self._granted[want.key] = asyncio.get_running_loop().create_future()
            answer = await want.ask(session)
            match answer:
                case [b"granted", packed]:
                    return packed
                case [b"queued"]:
                    try:
                        return await granted
                    except SessionEnded:
                        continue
                case [b"session"]:
                    self._session.ended(session)
                case [b"changed", packed]:
                    self.on_changed(want.targets[0], packed)
                    raise refusal(answer, want.requests, want.targets[0])
                case _:
                    raise refusal(answer, want.requests, want.targets[0])

    async def _leave(self, want: Want) -> bytes:
        """Takes what was granted at the last moment, or leaves the queue."""
        answer = await self._store.call("withdraw", want.key, wire.encode(want.targets), "1", patience=0)
        if answer[0] == b"granted":
            return answer[1]
        raise timed_out(want.requests, want.timeout)

    def hand_on(self, wait: str, targets: Sequence[str]) -> None:
        """Gives back, as soon as the store answers, what a caller that is gone may have been granted."""
        for target in targets:
            self._lost.pop(target, None)
        self.spawn(self._withdraw(wait, targets))

    async def _withdraw(self, wait: str, targets: Sequence[str]) -> None:
        grows = wait.endswith(GROWS)
        args = (wait, wire.encode(targets), "1" if grows else "0")
        answer = await self._store.call("withdraw", *args, patience=math.inf)
        if grows and answer[0] == b"granted":
            self.on_changed(targets[0], answer[1])

    def grant(self, wait: str, packed: bytes) -> bool:
        """The store granted what waited; False when nobody waits for it any more."""
        future = self._granted.get(wait)
        if future is not None and not future.done():
            future.set_result(packed)
        return future is not None

    def end(self, wait: str, error: Exception) -> None:
        future = self._granted.get(wait)
        if future is not None and not future.done():
            future.set_exception(error)
            future.exception()  # the asker may be gone: nobody has to hear of it

    def end_all(self, error: Exception) -> None:
        for wait in self._granted:
            self.end(wait, error)

    def lose(self, target: str, token: int) -> None:
        """A binding was lost of which only the asker may know yet that it was granted."""
        if target in self._targets:
            self._lost[target] = token

    def was_lost(self, binding: Binding) -> bool:
        return self._lost.pop(binding.id, None) == binding.token
