"""A manager's lease on the store.

The heartbeat renews the lease every third of the TTL and, in passing, takes back what dead managers held. When
the lease has ended after all (this process slept, the store lost everything) a new session begins: `on_renewed`
hears of it and re-binds. Tests: `test_resmgr_failover.py`.
"""

import asyncio
import math
import uuid
from collections.abc import Callable

from resmgr import process
from resmgr.errors import StoreMismatch
from resmgr.store import Store


class SessionEnded(Exception):
    """The lease is gone; whoever waited under it asks again under the next one."""


class Session:
    """`run` keeps the lease; `ready` gives the id to make calls under."""

    def __init__(
        self,
        store: Store,
        ttl: float | None,
        settle: float | None,
        on_message: Callable[[str, str, bytes], None],
        on_renewed: Callable[[], None],
    ) -> None:
        self.ttl = ttl or 0.0
        self.beats = 0
        self._store = store
        self._wanted_ttl = ttl
        self._settle = settle
        self._on_message = on_message
        self._on_renewed = on_renewed
        self._id = ""
        self._alive = asyncio.Event()
        self._ended = asyncio.Event()
        self._seen = "0-0"

    async def begin(self, patience: float | None = None) -> None:
        """A new lease; the settings of the store and ours must agree."""
        session = f"{process.identity()}-{uuid.uuid4().hex[:12]}"
        wanted = "" if self._wanted_ttl is None else str(round(self._wanted_ttl * 1000))
        answer = await self._store.call("hello", session, wanted, patience=patience)
        match [part.decode() for part in answer]:
            case ["schema", theirs, ours]:
                raise StoreMismatch(
                    f"{self._store.url} holds schema version {theirs}, this package writes {ours}; "
                    "use the package that wrote it, another namespace, or an empty store"
                )
            case ["ttl", theirs]:
                raise StoreMismatch(
                    f"ttl={self._wanted_ttl} s, but live leases of {self._store.url} run with "
                    f"{int(theirs) / 1000} s; leave ttl out to take that, or close the other managers first"
                )
            case ["ok", ttl]:
                # A store that has lost everything gets this one from whichever manager is first to return.
                self.ttl = self._wanted_ttl = int(ttl) / 1000
        self._id, self._seen = session, "0-0"
        self._ended.clear()
        self._alive.set()

    async def bury_the_dead(self) -> None:
        """Ends the leases of processes that were killed on this machine, without waiting for the TTL."""
        for session in (await self._store.call("sessions"))[1]:
            if process.is_dead(session.decode().rpartition("-")[0]):
                await self._store.call("expire", session)

    async def ready(self) -> str:
        """The current session's id; waits while there is none."""
        await self._alive.wait()
        return self._id

    def ended(self, session: str) -> None:
        """A call was told that `session` is no more."""
        if session == self._id:
            self._alive.clear()
            self._ended.set()

    def stop(self) -> None:
        """Wakes whoever waits for a session that will not come."""
        self._alive.set()

    async def run(self) -> None:
        """Consumes the inbox; waits for the next beat or the session's end; a begun session unblocks `ready`."""
        while True:
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._beat())
                    group.create_task(self._read())
            except* SessionEnded:
                pass
            await self.begin(math.inf)
            self._on_renewed()

    async def _beat(self) -> None:
        cursor = b"0"
        settle = round(1000 * (self.ttl if self._settle is None else self._settle))
        while True:
            session = self._id
            answer = await self._store.call("beat", session, settle, self._seen, cursor, patience=math.inf)
            if answer[0] == b"session":
                self.ended(session)
            else:
                self.beats += 1
                more, cursor = answer[1:]
                if more:
                    continue
            try:
                async with asyncio.timeout(self.ttl / 3):
                    await self._ended.wait()
                raise SessionEnded
            except TimeoutError:
                pass

    async def _read(self) -> None:
        async for entries in self._store.follow(f"inbox:{self._id}", self._seen):
            for number, message in entries:
                kind, key, body = message.split(b"\n", 2)
                self._on_message(kind.decode(), key.decode(), body)
                self._seen = number
