"""Signs of life of an HTTP server, asked for every few seconds over a connection that carries nothing else.

Invariants (tests/llmproxy/test_llmproxy_http_worker.py):
- a server that takes requests and never answers is told of, `silence` seconds after it was asked at the latest, and
  again while that goes on;
- when the connection ends, the server may have been replaced: it is asked at once, and must be the one that it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from .errors import WorkerLost
from .upstream import Pool, call


class Life:
    """Watches the server at `url`. `lost` is told why there is no sign; `same` says why it is not the same server."""

    def __init__(
        self,
        url: str,
        headers: bytes,
        every: float,
        silence: float,
        *,
        same: Callable[[], Awaitable[str]],
        lost: Callable[[str], None],
    ) -> None:
        self.pool = Pool(url, on_closed=self._ended)
        self.hushed = False
        """While set, silence is expected, as of a server that loads weights."""
        self._headers = headers
        self._every = every
        self._silence = silence
        self._is_same = same
        self._lost = lost
        self._replaced = False
        self._look = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None

    def watch(self) -> None:
        """Look from now on; does nothing when it does already, or `every` is 0."""
        if self._watching is None and self._every > 0:
            self._watching = asyncio.create_task(self._watch())

    def look(self) -> None:
        """Something was odd: look now."""
        self._look.set()

    async def close(self) -> None:
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        self.pool.abort()

    async def _watch(self) -> None:
        """Asks every few seconds, or when `look` says so; ends with `close`."""
        while True:
            self._look.clear()
            reason = await self._ask()
            if reason and not self.hushed:
                self._lost(reason)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._every):
                    await self._look.wait()

    async def _ask(self) -> str:
        """Why there is no sign; empty when there is one."""
        replaced, self._replaced = self._replaced, False
        try:
            async with asyncio.timeout(self._silence):
                answer = await call(self.pool, "GET", "/health", b"", self._headers)
                if answer.status >= 500:
                    return f"/health answered {answer.status}"
                return await self._is_same() if replaced else ""
        except WorkerLost as error:
            return error.reason
        except TimeoutError:
            return f"gave no sign of life in {self._silence} s"

    def _ended(self) -> None:
        self._replaced = True
        self._look.set()
