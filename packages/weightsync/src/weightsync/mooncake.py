"""A Mooncake store as ours. Its errors are return codes; here each becomes the type it means.

Mooncake's ways that this adapter answers (`test_weightsync_mooncake.py`):

- Unpinned objects are evicted in silence: everything is hard-pinned, and only `delete` removes.
- `put` on an existing key keeps the old value, which is what ours promises, and also on a key whose writer died: so
  bucket keys are never used twice, and the publisher looks whether its manifest has come into being.
- An object cannot be read while it is overwritten, stays so if its writer dies, and may be read half overwritten:
  `replace` alternates between two objects, and numbers and seals its values, so that one can always be read.
- There is nothing to wait on: `changed` looks again after a pause that doubles up to `poll`.
- A lease protects an object while it is read: `delete` overrides it, because retention knows who still reads.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from weightsync.blocking import in_thread
from weightsync.errors import Missing, StoreError, StoreFull, StoreUnavailable
from weightsync.tensors import Bytes

__all__ = ["MooncakeStore"]

_NO_SPACE = -200
_MISSING = -704
# An object whose writer has not finished, or died: to a reader it does not exist yet.
_NOT_READY = -703
# The process that lends the memory does not answer.
_TRANSFER_FAILED = -800
_UNREACHABLE = range(-999, -899)
_FIRST_PAUSE = 0.005
_SEQUENCE_BYTES = 8
# Each part is a transfer of its own; smaller ones than this on average cost more than a copy of them all.
_GATHER_BYTES = 1 << 20
_SEAL_BYTES = 16
_CONNECT_SECONDS = 5.0
# A reader asks again when writers overtake it; twice is rare.
_READS = 10


class MooncakeStore:
    """A namespace of the Mooncake store whose master is at `master` (host:port).

    By default a pure client. With `segment_bytes` this process also lends memory, and what lies in it is lost when
    it ends: so lend it from a process that outlives publishers, as `MooncakeMaster` does.
    """

    def __init__(
        self,
        master: str,
        namespace: str = "weights",
        *,
        host: str = "127.0.0.1",
        metadata: str = "P2PHANDSHAKE",
        protocol: str = "tcp",
        devices: str = "",
        segment_bytes: int = 0,
        poll: float = 0.1,
    ) -> None:
        library = _library()
        _check_reachable(master)
        self._poll = poll
        self._namespace = namespace
        self._master = master
        self._sequence: dict[str, int] = {}
        # register_buffer counts no references: one buffer at a time per address.
        self._registering = threading.Lock()
        # A transfer is waited for by a thread that spins; two at a time take each other's cores.
        self._putting = asyncio.Lock()
        self._pin = library.ReplicateConfig()
        self._pin.with_hard_pin = True
        self._client: Any = library.MooncakeDistributedStore()
        # The local buffer serves only small objects; buckets go from and to the caller's memory.
        code = self._client.setup(host, metadata, segment_bytes, 16 << 20, protocol, devices, master)
        if code:
            raise StoreUnavailable(f"the Mooncake store at {master} refused this client (code {code})")

    async def put(self, key: str, parts: Sequence[Bytes]) -> None:
        async with self._putting:
            await in_thread(self._put, key, parts)

    async def get_into(self, key: str, offset: int, buffer: Bytes) -> None:
        await in_thread(self._get_into, key, offset, buffer)

    async def get(self, key: str) -> bytes | None:
        return await in_thread(self._get, key)

    async def present(self, keys: Sequence[str]) -> list[bool]:
        return await in_thread(self._present, keys)

    async def replace(self, key: str, value: bytes) -> None:
        await in_thread(self._replace, key, value)

    async def read(self, key: str) -> bytes | None:
        return (await in_thread(self._read, key))[1]

    async def changed(self, key: str, seen: bytes | None) -> bytes:
        pause = _FIRST_PAUSE
        while (value := await self.read(key)) in (None, seen):
            await asyncio.sleep(pause)
            pause = min(2 * pause, self._poll)
        return value

    async def delete(self, keys: Sequence[str]) -> None:
        codes = await in_thread(self._client.batch_remove, [self._key(key) for key in keys], True)
        for key, code in zip(keys, codes, strict=True):
            if code not in (_MISSING, _NOT_READY):
                self._check(code, key, 0)

    async def close(self) -> None:
        await in_thread(self._client.close)

    def _key(self, key: str) -> str:
        return f"{self._namespace}:{key}"

    def _check(self, code: int, key: str, size: int) -> None:
        if code >= 0:
            return
        where = f"the Mooncake store at {self._master}"
        if code == _NO_SPACE:
            raise StoreFull(f"no room for {key!r} of {size} bytes in {where}: lend larger segments, or keep fewer")
        if code in (_MISSING, _NOT_READY):
            raise Missing(f"{key!r} is not in {where}")
        if code == _TRANSFER_FAILED:
            raise StoreUnavailable(f"no memory behind {where} answers for {key!r}: is its lender running?")
        if code in _UNREACHABLE:
            raise StoreUnavailable(f"{where} does not answer (code {code}): is its master running?")
        raise StoreError(f"{where} failed on {key!r} with code {code}")

    def _check_written(self, code: int, key: str, size: int) -> None:
        """What was just written is missing only if its memory is."""
        self._check(_TRANSFER_FAILED if code in (_MISSING, _NOT_READY) else code, key, size)

    def _put(self, key: str, parts: Sequence[Bytes]) -> None:
        spans = _spans(parts)
        size = sum(span[1] for span in spans)
        if size < _GATHER_BYTES * len(spans):
            whole = np.concatenate(parts)
            spans = [(whole.ctypes.data, size)]
        addresses, sizes = [address for address, _ in spans], [size for _, size in spans]
        put = self._client.batch_put_from_multi_buffers
        self._check_written(put([self._key(key)], [addresses], [sizes], self._pin)[0], key, sum(sizes))

    def _get_into(self, key: str, offset: int, buffer: Bytes) -> None:
        address = buffer.ctypes.data
        with self._registering:
            self._check(self._client.register_buffer(address, buffer.size), key, buffer.size)
            try:
                code = self._client.get_into_ranges(
                    [address], [[self._key(key)]], [[[0]]], [[[offset]]], [[[buffer.size]]]
                )[0][0][0]
            finally:
                self._client.unregister_buffer(address)
        self._check(code, key, buffer.size)

    def _get(self, key: str) -> bytes | None:
        name = self._key(key)
        for _ in range(_READS):
            value: bytes = self._client.get(name)
            if value:
                return value
            # That is also what `get` answers when it finds no master.
            _check_reachable(self._master)
            code = self._client.get_size(name)
            if code in (_MISSING, _NOT_READY):
                return None
            self._check(code, key, 0)
            # It exists: it came into being between the two questions.
        raise StoreError(f"{key!r} exists in the Mooncake store at {self._master}, but cannot be read")

    def _present(self, keys: Sequence[str]) -> list[bool]:
        codes = self._client.batch_is_exist([self._key(key) for key in keys])
        for key, code in zip(keys, codes, strict=True):
            self._check(code, key, 0)
        return [code == 1 for code in codes]

    def _replace(self, key: str, value: bytes) -> None:
        # Once this client has written, it knows the number: whoever else writes has fenced it off.
        sequence = (self._sequence.get(key) or self._read(key)[0]) + 1
        data = _sealed(sequence, value)
        code = self._client.upsert(f"{self._key(key)}.{sequence % 2}", data, self._pin)
        self._check_written(code, key, len(data))
        self._sequence[key] = sequence

    def _read(self, key: str) -> tuple[int, bytes | None]:
        """The newest readable value and its number; while it is being replaced this may be the one before."""
        names = [f"{self._key(key)}.{side}" for side in range(2)]
        for _ in range(_READS):
            found = [data for data in self._client.get_batch(names) if data]
            newest = max(map(_unsealed, found), default=(0, None), key=lambda read: read[0])
            if newest[0]:
                return newest
            _check_reachable(self._master)
            if all(self._client.get_size(name) == _MISSING for name in names):
                return newest
        # The first value of all was never finished.
        return 0, None


def _spans(parts: Sequence[Bytes]) -> list[tuple[int, int]]:
    """Address and size of each part; those that lie one behind the other, as in a trainer's flat buffer, are one."""
    spans: list[tuple[int, int]] = []
    for part in parts:
        address = part.ctypes.data
        if spans and sum(spans[-1]) == address:
            spans[-1] = (spans[-1][0], spans[-1][1] + part.size)
        elif part.size:
            spans.append((address, part.size))
    return spans


def _sealed(sequence: int, value: bytes) -> bytes:
    body = sequence.to_bytes(_SEQUENCE_BYTES, "big") + value
    return xxhash.xxh3_128_digest(body) + body


def _unsealed(data: bytes) -> tuple[int, bytes | None]:
    """Nothing, if the data was overwritten while it was read: Mooncake frees an old value's memory at once."""
    body = data[_SEAL_BYTES:]
    if xxhash.xxh3_128_digest(body) != data[:_SEAL_BYTES]:
        return 0, None
    return int.from_bytes(body[:_SEQUENCE_BYTES], "big"), body[_SEQUENCE_BYTES:]


def _check_reachable(master: str) -> None:
    """The library itself would try for a minute and a half before it gives up."""
    host, _, port = master.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise StoreUnavailable(f"no Mooncake master answers at {master} ({error}): start mooncake_master") from error


def _library() -> Any:
    try:
        import mooncake.store
    except ModuleNotFoundError as error:
        raise StoreUnavailable("mooncake is not installed: pip install rollart-weightsync[mooncake]") from error
    except ImportError as error:
        raise StoreUnavailable(f"Mooncake does not load ({error}): install the Debian package libibverbs1") from error
    return mooncake.store
