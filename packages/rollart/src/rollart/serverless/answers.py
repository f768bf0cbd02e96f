"""Answers by idempotency key: a call that comes again gets the answer of the first, which runs once.

Invariants (tests/rollart/test_rollart_serverless_server.py::test_a_key_runs_once):
- while the first runs, others wait for it, also when its own caller has gone;
- only answers are remembered, so a failure may be tried again; at most `most`, the oldest go first;
- a key that comes with another body is refused.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable

import msgspec

from rollart.serverless.errors import KeyReused


class _Kept(msgspec.Struct):
    digest: bytes
    task: asyncio.Task[bytes]


class Answers:
    """The calls that carry a key. `run` does the work."""

    def __init__(self, run: Callable[[bytes], Awaitable[bytes]], most: int) -> None:
        self._run = run
        self._most = most
        self._kept: dict[str, _Kept] = {}

    async def get(self, key: str, body: bytes) -> tuple[bytes, bool]:
        """The answer, and whether it is that of an earlier call."""
        digest = hashlib.sha256(body).digest()
        kept = self._kept.get(key)
        if kept is not None and kept.digest != digest:
            raise KeyReused(f"idempotency key {key!r} came before with another body; use a key for each body")
        again = kept is not None
        if kept is None:
            task = asyncio.ensure_future(self._work(body))
            kept = self._kept[key] = _Kept(digest, task)
            task.add_done_callback(lambda done: self._ended(key, done))
        return await asyncio.shield(kept.task), again

    async def _work(self, body: bytes) -> bytes:
        return await self._run(body)

    def _ended(self, key: str, task: asyncio.Task[bytes]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._kept.pop(key, None)
        done = [kept for kept, value in self._kept.items() if value.task.done()]
        for old in done[: max(0, len(done) - self._most)]:
            del self._kept[old]

    async def settle(self) -> None:
        """Waits for what still runs."""
        tasks = [kept.task for kept in self._kept.values() if not kept.task.done()]
        if tasks:
            await asyncio.wait(tasks)

    async def close(self) -> None:
        tasks = [kept.task for kept in self._kept.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._kept.clear()
