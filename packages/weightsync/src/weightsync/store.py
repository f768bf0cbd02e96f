"""What a store must do, and the store that lives in one process.

Keys are short names without a slash. Objects are written once and never change; `replace` is for the one small
value, the index, that does. `test_weightsync_stores.py` runs the same conformance suite on every store, from
several processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from weightsync.errors import Missing, StoreError
from weightsync.tensors import Bytes

__all__ = ["MemoryStore", "Store"]


class Store(Protocol):
    """A place that publishers write to and subscribers read from.

    Cancellation is safe everywhere: when a call has ended, however it ended, no thread of the store touches the
    caller's buffers any more.
    """

    async def put(self, key: str, parts: Sequence[Bytes]) -> None:
        """Write the concatenated parts, not all empty, whole or not at all; an object that exists stays as it is."""

    async def get_into(self, key: str, offset: int, buffer: Bytes) -> None:
        """Fill the buffer from the object's bytes at `offset`; raises Missing, or StoreError when it is shorter."""

    async def get(self, key: str) -> bytes | None:
        """A small object whole, or None."""

    async def present(self, keys: Sequence[str]) -> list[bool]:
        """Which of the objects exist."""

    async def replace(self, key: str, value: bytes) -> None:
        """Write a small mutable value; a reader sees the old or the new one, whole, even if the writer is killed."""

    async def read(self, key: str) -> bytes | None:
        """A value written by `replace`, or None."""

    async def changed(self, key: str, seen: bytes | None) -> bytes:
        """Wait until the value of `replace` differs from `seen`, and return it."""

    async def delete(self, keys: Sequence[str]) -> None:
        """Remove objects and what their unfinished writes left; those that do not exist are passed over."""

    async def close(self) -> None:
        """Let go of connections and threads; the content stays."""


class MemoryStore:
    """A store inside one process, shared by passing the object: for tests, and trainers that generate in process."""

    def __init__(self) -> None:
        self._objects: dict[str, Bytes] = {}
        self._values: dict[str, bytes] = {}
        self._change = asyncio.Condition()

    async def put(self, key: str, parts: Sequence[Bytes]) -> None:
        if key not in self._objects:
            self._objects[key] = np.concatenate(parts)

    async def get_into(self, key: str, offset: int, buffer: Bytes) -> None:
        if key not in self._objects:
            raise Missing(f"{key!r} is not in this memory store")
        data = self._objects[key][offset : offset + buffer.size]
        if data.size != buffer.size:
            raise StoreError(f"{key!r} ends {buffer.size - data.size} bytes early")
        buffer[:] = data

    async def get(self, key: str) -> bytes | None:
        found = self._objects.get(key)
        return None if found is None else found.tobytes()

    async def present(self, keys: Sequence[str]) -> list[bool]:
        return [key in self._objects for key in keys]

    async def replace(self, key: str, value: bytes) -> None:
        self._values[key] = value
        async with self._change:
            self._change.notify_all()

    async def read(self, key: str) -> bytes | None:
        return self._values.get(key)

    async def changed(self, key: str, seen: bytes | None) -> bytes:
        async with self._change:
            await self._change.wait_for(lambda: self._values.get(key) not in (None, seen))
            return self._values[key]

    async def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._objects.pop(key, None)

    async def close(self) -> None:
        pass
