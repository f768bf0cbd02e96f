"""A cap on the bandwidth of a store, so that a background pull leaves room for others, or to play a slow link."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from weightsync.errors import BadConfig
from weightsync.store import Store
from weightsync.tensors import Bytes

__all__ = ["ThrottledStore"]

# The part of a second in which bytes may burst: a transfer is paid for in slices of this length.
_SLICE_SECONDS = 0.05


class ThrottledStore:
    """`store` with both directions together capped at `bytes_per_second`. Small values go through uncounted.

    Transfers share the link in turn: each slice books the time it needs behind those that are booked
    (`test_weightsync_throttle.py`, on virtual time).
    """

    def __init__(self, store: Store, bytes_per_second: float) -> None:
        if not 0 < bytes_per_second < math.inf:
            raise BadConfig(f"bytes_per_second is {bytes_per_second}; it must be positive and finite")
        self._store = store
        self._rate = bytes_per_second
        self._free_at = 0.0

    async def _pay(self, size: int) -> None:
        loop = asyncio.get_running_loop()
        self._free_at = max(self._free_at, loop.time()) + size / self._rate
        await asyncio.sleep(self._free_at - loop.time())

    async def put(self, key: str, parts: Sequence[Bytes]) -> None:
        await self._pay(sum(part.size for part in parts))
        await self._store.put(key, parts)

    async def get_into(self, key: str, offset: int, buffer: Bytes) -> None:
        step = max(1, int(self._rate * _SLICE_SECONDS))
        for first in range(0, buffer.size, step):
            part = buffer[first : first + step]
            await self._pay(part.size)
            await self._store.get_into(key, offset + first, part)

    async def get(self, key: str) -> bytes | None:
        return await self._store.get(key)

    async def present(self, keys: Sequence[str]) -> list[bool]:
        return await self._store.present(keys)

    async def replace(self, key: str, value: bytes) -> None:
        await self._store.replace(key, value)

    async def read(self, key: str) -> bytes | None:
        return await self._store.read(key)

    async def changed(self, key: str, seen: bytes | None) -> bytes:
        return await self._store.changed(key, seen)

    async def delete(self, keys: Sequence[str]) -> None:
        await self._store.delete(keys)

    async def close(self) -> None:
        await self._store.close()
