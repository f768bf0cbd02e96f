"""Trainers whose ranks each hold a part of the model, and readers of other degrees.

Each trainer rank publishes its own shards to its own store (`publish(..., shards={name: Shard(dim, start, size)})`);
each reader says which part of each tensor it wants, fetches only the byte ranges that hold it (in whole leaves, see
`checksum`), and is given its parts put together (see `assembly`). A version is there when every rank has published it
(`test_weightsync_sharding.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import numpy as np

from weightsync.assembly import Part, assembled, combined, described, needed
from weightsync.blocking import each, in_thread
from weightsync.checksum import checksum
from weightsync.errors import EngineRefused
from weightsync.handover import Load, Ranges, check_fits, verify
from weightsync.manifest import Plan
from weightsync.store import Store
from weightsync.subscriber import Commit, Staged, Subscriber

__all__ = ["Part", "ShardedSubscriber"]


class ShardedSubscriber:
    """Reads one version from the stores of all trainer ranks.

    `parts` names what is wanted of which tensor; a tensor that is not named is wanted whole. Tensors that every rank
    has whole (norms) are taken from the first.
    """

    def __init__(self, stores: Sequence[Store], parts: Mapping[str, Part], *, timeout: float = 3600.0) -> None:
        self._parts = parts
        self._subscribers = [
            Subscriber(store, timeout=timeout, needs=self._needs(first=not number))
            for number, store in enumerate(stores)
        ]

    async def prefetch(self, version: int, timeout: float | None = None) -> list[Staged]:
        found: dict[int, Staged] = {}

        async def pull(number: int) -> None:
            found[number] = await self._subscribers[number].prefetch(version, timeout)

        await each(len(self._subscribers), range(len(self._subscribers)), pull)
        return [found[number] for number in sorted(found)]

    async def commit(self, staged: Sequence[Staged], load: Load) -> Commit:
        """As `Subscriber.commit`, of the wanted parts; the digest is over the names and bytes that were given."""
        check_fits(described([one.plan for one in staged], self._parts), load)
        start = asyncio.get_running_loop().time()
        digests: list[str] = []
        count = size = 0

        def assemble() -> None:
            nonlocal count, size
            for one in staged:
                verify(one.manifest, one.plan, one.staging.array, one.ranges)
            for tensor in assembled([(one.plan, one.staging.array) for one in staged], self._parts):
                load(tensor.meta.name, tensor)
                identity = np.frombuffer(msgspec.msgpack.encode(tensor.meta), np.uint8)
                digests.append(checksum([identity, tensor.data]))
                count, size = count + 1, size + tensor.data.size

        async with self._using(staged):
            await in_thread(assemble)
        took = asyncio.get_running_loop().time() - start
        digest = checksum([np.frombuffer("".join(digests).encode(), np.uint8)])
        return Commit(staged[0].version, digest, took, size, count)

    async def commit_with(self, staged: Sequence[Staged], load: Callable[[], Awaitable[str]]) -> Commit:
        """Commit by other means: `load()` loads from the staging memories, which nobody writes meanwhile.

        Raises EngineRefused unless it gives the digest of what all ranks published (`combined`).
        """
        async with self._using(staged):
            start = asyncio.get_running_loop().time()
            digest = await load()
            took = asyncio.get_running_loop().time() - start
        published = combined([one.manifest.digest for one in staged])
        if digest != published:
            raise EngineRefused(f"version {staged[0].version}: loaded {digest}, published {published}")
        names = {meta.name for one in staged for meta in one.plan.tensors}
        return Commit(staged[0].version, digest, took, sum(one.staging.array.size for one in staged), len(names))

    async def close(self) -> None:
        for subscriber in self._subscribers:
            await subscriber.close()

    @asynccontextmanager
    async def _using(self, staged: Sequence[Staged]) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for subscriber, one in zip(self._subscribers, staged, strict=True):
                await stack.enter_async_context(subscriber.using(one))
            yield

    def _needs(self, *, first: bool) -> Callable[[Plan], Ranges]:
        """What of a rank's buckets holds something wanted."""
        return lambda plan: needed(plan, self._parts, first=first)
