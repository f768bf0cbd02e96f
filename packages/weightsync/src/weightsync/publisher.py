"""Publishing: buckets first, the manifest last, the announcement after it; then retention.

- A version exists only when its manifest does, so a publisher killed at any byte leaves the last version usable,
  and the next publisher sweeps what it left
  (`test_weightsync_faults.py::test_a_publisher_killed_at_any_store_operation`).
- Retention keeps `keep` versions, the bases that their deltas need, and for at most `hold_seconds` longer what a
  subscriber is pulling (`test_weightsync_retention.py`).
- Two publishers never interleave in one store: the later one fences the earlier.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import deque
from collections.abc import Mapping
from typing import Literal

import msgspec
import numpy as np

from weightsync.blocking import each, in_thread
from weightsync.checks import check_count, check_seconds, check_version
from weightsync.errors import BadConfig, Fenced, LayoutChanged, StoreError, VersionConflict, VersionTimeout
from weightsync.index import HOLD_SLOTS, INDEX, Entry, Index, hold_key
from weightsync.manifest import Bucket, Manifest, Plan, Shard, TensorMeta, manifest_key
from weightsync.source import Source
from weightsync.store import Store
from weightsync.tensors import NO_SHARDS, Bytes, NamedTensors, describe

__all__ = ["Publisher", "PublisherStats", "Push"]

# One bucket is checksummed or copied from the device while another is put.
_IN_FLIGHT = 2
# Publications that `pushes` remembers.
_PUSHES = 256
_TAKEN_OVER = "another publisher has taken over this store; stop one, or use two stores"


class Push(msgspec.Struct, frozen=True):
    """What one publication cost: `seconds` until it was visible, bytes, and in `density` the changed share."""

    version: int
    seconds: float
    content_bytes: int
    wire_bytes: int
    density: float


class PublisherStats(msgspec.Struct, frozen=True):
    """Totals since the publisher was made, what it is `publishing`, and the versions that the store holds."""

    pushes: int
    push_seconds: float
    content_bytes: int
    wire_bytes: int
    publishing: int | None
    versions: tuple[int, ...]
    last: Push | None


class Publisher:
    """The one writer of a store. Tensors must not change until `publish` has returned."""

    def __init__(
        self,
        store: Store,
        *,
        bucket_bytes: int = 1 << 30,
        encoding: Literal["full", "delta"] = "full",
        keep: int = 2,
        hold_seconds: float = 600.0,
        anchor_every: int = 20,
        timeout: float = 3600.0,
    ) -> None:
        Plan((), bucket_bytes)
        if encoding not in ("full", "delta"):
            raise BadConfig(f"encoding is {encoding!r}; use 'full' or 'delta'")
        check_count("keep", keep)
        check_count("anchor_every", anchor_every)
        check_seconds("timeout", timeout, positive=True)
        check_seconds("hold_seconds", hold_seconds)
        self.pushes: deque[Push] = deque(maxlen=_PUSHES)
        self._store = store
        self._bucket_bytes = bucket_bytes
        self._delta = encoding == "delta"
        self._keep = keep
        self._hold_seconds = hold_seconds
        self._anchor_every = anchor_every
        self._timeout = timeout
        self._process = os.getpid()
        self._id = secrets.token_hex(8)
        self._index: Index | None = None
        self._lock = asyncio.Lock()
        self._last: Manifest | None = None
        self._snapshot: Bytes | None = None
        self._since_anchor = 0
        self._due: dict[int, float] = {}
        self._publishing: int | None = None
        self._totals = (0, 0.0, 0, 0)

    def stats(self) -> PublisherStats:
        versions = tuple(entry.version for entry in self._index.versions) if self._index is not None else ()
        last = self.pushes[-1] if self.pushes else None
        return PublisherStats(*self._totals, self._publishing, versions, last)

    async def publish(
        self, version: int, named_tensors: NamedTensors, shards: Mapping[str, Shard] = NO_SHARDS
    ) -> Manifest:
        """Publish the tensors as `version` and return its manifest once everyone can see it.

        Versions ascend. Publishing one again with the same content changes nothing; with other content it raises
        VersionConflict. Raises VersionTimeout after the publisher's `timeout`. `shards` says which tensors are parts
        of larger ones (see `weightsync.sharding`).
        """
        check_version(version)
        async with self._lock:
            self._publishing = version
            try:
                async with asyncio.timeout(self._timeout):
                    return await self._publish(version, named_tensors, shards)
            except TimeoutError:
                raise VersionTimeout(
                    f"version {version} is not published within {self._timeout} s: the store is too slow, or stuck"
                ) from None
            finally:
                self._publishing = None

    async def _publish(self, version: int, named_tensors: NamedTensors, shards: Mapping[str, Shard]) -> Manifest:
        start = asyncio.get_running_loop().time()
        metas, tensors = describe(named_tensors, shards)
        plan = Plan(metas, self._bucket_bytes)
        index = await self._own()
        self._check_layout(metas)
        source = Source(plan, tensors)
        if (entry := index.find(version)) is not None:
            return await self._same(entry, source)
        if index.latest is not None and version < index.latest:
            raise VersionConflict(f"version {version} is older than the latest, {index.latest}; or rewind first")
        manifest = await self._push(index, version, source)
        took = asyncio.get_running_loop().time() - start
        self._note(Push(version, took, plan.total, manifest.wire_bytes, manifest.density))
        await self._retire()
        return manifest

    def _note(self, push: Push) -> None:
        pushes, seconds, content, wire = self._totals
        self._totals = pushes + 1, seconds + push.seconds, content + push.content_bytes, wire + push.wire_bytes
        self.pushes.append(push)

    async def rewind(self, version: int) -> None:
        """Remove every version after `version`, so that a run resumed from a checkpoint publishes them anew."""
        check_version(version)
        async with self._lock:
            index = await self._own()
            kept = tuple(entry for entry in index.versions if entry.version <= version)
            for entry in reversed(
                index.versions[len(kept) :]
            ):  # pending, so that whoever comes next ends what is begun
                index = msgspec.structs.replace(index.without(entry), pending=entry)
                await self._write(index)
                await self._store.delete(entry.keys())
            await self._adopt(Index(self._id, kept))

    async def _own(self) -> Index:
        """The index as it is, ours, and free of what a dead publisher, or a failed publication of ours, left."""
        if self._process != os.getpid():  # a fork of a publisher is another publisher
            self._process, self._id, self._index = os.getpid(), secrets.token_hex(8), None
        value = await self._store.read(INDEX)
        stored = Index.decode(value) if value is not None else Index(self._id)
        if self._index is not None and stored.owner != self._id:
            raise Fenced(_TAKEN_OVER)
        if self._index is not None and value is not None and self._index.pending is None:
            return self._index
        entries = [*stored.versions, *([stored.pending] if stored.pending else [])]
        found = await self._store.present([manifest_key(entry.version) for entry in entries])
        for entry, exists in zip(entries, found, strict=True):
            if not exists:
                await self._store.delete(entry.keys())
        versions = tuple(entry for entry, exists in zip(entries, found, strict=True) if exists)
        return await self._adopt(Index(self._id, versions))

    async def _adopt(self, index: Index) -> Index:
        """Make `index` the store's, and its latest version the one that others are compared with."""
        await self._write(index)
        data = await self._store.get(manifest_key(index.latest)) if index.latest is not None else None
        self._last = Manifest.decode(data) if data is not None else None
        self._snapshot = None
        return index

    async def _write(self, index: Index) -> None:
        await self._store.replace(INDEX, index.encode())
        self._index = index

    def _check_layout(self, metas: tuple[TensorMeta, ...]) -> None:
        if self._last is None:
            return
        if self._last.bucket_bytes != self._bucket_bytes:
            raise LayoutChanged(f"bucket_bytes is {self._bucket_bytes}, the store has {self._last.bucket_bytes}")
        if metas == self._last.tensors:
            return
        before, now = ({meta.name: meta for meta in each} for each in (self._last.tensors, metas))
        name = next((n for n in (*now, *before) if now.get(n) != before.get(n)), "(their order)")
        raise LayoutChanged(
            f"tensor {name!r} is {_describe(now.get(name))}, version {self._last.version} had "
            f"{_describe(before.get(name))}; publish another model to another store"
        )

    async def _same(self, entry: Entry, source: Source) -> Manifest:
        data = await self._store.get(manifest_key(entry.version))
        assert data is not None, "the owner saw this manifest a moment ago"
        manifest = Manifest.decode(data)
        digests = [await in_thread(source.digest, index) for index in range(len(source.plan))]
        if digests != [bucket.digest for bucket in manifest.buckets]:
            raise VersionConflict(f"version {entry.version} is published with other content; use the next number")
        return manifest

    async def _push(self, index: Index, version: int, source: Source) -> Manifest:
        attempt, plan = secrets.token_hex(4), source.plan
        base = self._base()
        pending = Entry(version, attempt, len(plan), base)
        await self._write(Index(self._id, index.versions, pending))
        buckets: list[Bucket | None] = [None] * len(plan)
        changed = np.zeros(len(plan), np.int64)
        snapshot = self._fresh_snapshot(plan)
        manifest = Manifest(
            version=version, attempt=attempt, bucket_bytes=plan.bucket_bytes, tensors=tuple(plan.tensors), buckets=()
        )

        async def push(number: int) -> None:
            content = snapshot[plan.span(number)] if snapshot is not None else None
            encoded = await in_thread(source.encode, number, content, base is not None)
            buckets[number], changed[number] = encoded.bucket, encoded.changed
            if encoded.bucket.wire_bytes:
                await self._store.put(manifest.key(number), encoded.parts)
            source.give_back(encoded)

        # Until this publication stands, the snapshot is neither version's content.
        self._snapshot = None
        await each(_IN_FLIGHT, range(len(plan)), push)
        done = tuple(bucket for bucket in buckets if bucket is not None)
        manifest = msgspec.structs.replace(
            manifest,
            buckets=done,
            base=base if any(bucket.delta for bucket in done) else None,
            density=float(changed.sum() / max(1, plan.elements)) if base is not None else 1.0,
        )
        await self._announce(index, manifest)
        self._last, self._snapshot = manifest, snapshot
        self._since_anchor = self._since_anchor + 1 if manifest.base is not None else 0
        return manifest

    async def _announce(self, index: Index, manifest: Manifest) -> None:
        key, data = manifest_key(manifest.version), manifest.encode()
        await self._check_ours(manifest)
        await self._store.put(key, [np.frombuffer(data, np.uint8)])
        stored = await self._store.get(key)
        if stored is None:
            raise StoreError(f"{key!r} is blocked by the unfinished write of a dead publisher; try again later")
        if stored != data:
            raise Fenced(_TAKEN_OVER)
        entry = Entry(manifest.version, manifest.attempt, len(manifest.buckets), manifest.base)
        await self._write(Index(self._id, (*index.versions, entry)))

    async def _check_ours(self, manifest: Manifest) -> None:
        """The buckets took a while: meanwhile another may have taken over, or the store have lost what it held."""
        value = await self._store.read(INDEX)
        if value is None:
            raise StoreError(f"the store lost everything while version {manifest.version} was published: do it again")
        if Index.decode(value).owner != self._id:
            await self._store.delete([manifest.key(number) for number in range(len(manifest.buckets))])
            raise Fenced(_TAKEN_OVER)

    def _base(self) -> int | None:
        if self._snapshot is None or self._last is None or self._since_anchor + 1 >= self._anchor_every:
            return None
        return self._last.version

    def _fresh_snapshot(self, plan: Plan) -> Bytes | None:
        if not self._delta:
            return None
        return self._snapshot if self._snapshot is not None else np.zeros(plan.total, np.uint8)

    async def _retire(self) -> None:
        """Delete what retention does not keep. The stored index drops it later; a restart finds it gone."""
        index = self._index
        assert index is not None, "something was published"
        now = asyncio.get_running_loop().time()
        bases: set[int | None] = set()
        for entry in reversed(index.surplus(self._keep)):  # what is held holds its bases, which come after it
            due = self._due.setdefault(entry.version, now + self._hold_seconds)
            holds = await self._store.present([hold_key(entry.version, slot) for slot in range(HOLD_SLOTS)])
            if (any(holds) or entry.version in bases) and now < due:
                bases.add(entry.base)
                continue
            self._index = msgspec.structs.replace(index, pending=entry)  # where this fails, the next call looks again
            await self._store.delete(entry.keys())
            del self._due[entry.version]
            index = index.without(entry)
        self._index = index


def _describe(meta: TensorMeta | None) -> str:
    if meta is None:
        return "absent"
    part = f" from {meta.shard.start} of {meta.shard.size}" if meta.shard else ""
    return f"{meta.dtype}{list(meta.shape)}{part}" + (f" tied to {meta.tied_to!r}" if meta.tied_to else "")
