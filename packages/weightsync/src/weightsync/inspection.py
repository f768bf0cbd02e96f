"""What a store holds, verified: the versions, their sizes, and whether every object has its published checksum."""

from __future__ import annotations

import msgspec
import numpy as np

from weightsync.blocking import in_thread
from weightsync.errors import StoreError, StoreUnavailable
from weightsync.handover import is_published
from weightsync.index import INDEX, Index
from weightsync.manifest import Manifest, Plan, manifest_key
from weightsync.store import Store

__all__ = ["VersionInfo", "inspect"]


class VersionInfo(msgspec.Struct, frozen=True):
    """One version; `bad` are the numbers of the buckets whose object is missing or fails its checksum."""

    version: int
    base: int | None
    tensors: int
    buckets: int
    content_bytes: int
    wire_bytes: int
    density: float
    digest: str
    bad: tuple[int, ...]


async def inspect(store: Store, *, verify: bool = True) -> list[VersionInfo]:
    """The versions of a store, oldest first; with `verify`, every object is read and checked."""
    value = await store.read(INDEX)
    if value is None:
        return []
    index, found = Index.decode(value), []
    for entry in [*index.versions, *([index.pending] if index.pending else [])]:
        data = await store.get(manifest_key(entry.version))
        if data is None:
            continue
        manifest = Manifest.decode(data)
        bad = [
            number for number in range(len(manifest.buckets)) if verify and not await _good(store, manifest, number)
        ]
        if bad and await store.get(manifest_key(entry.version)) != data:
            continue  # it was removed while it was read
        found.append(_info(manifest, tuple(bad)))
    return found


def _info(manifest: Manifest, bad: tuple[int, ...]) -> VersionInfo:
    return VersionInfo(
        version=manifest.version,
        base=manifest.base,
        tensors=len(manifest.tensors),
        buckets=len(manifest.buckets),
        content_bytes=Plan(manifest.tensors, manifest.bucket_bytes).total,
        wire_bytes=manifest.wire_bytes,
        density=manifest.density,
        digest=manifest.digest,
        bad=bad,
    )


async def _good(store: Store, manifest: Manifest, number: int) -> bool:
    bucket = manifest.buckets[number]
    if not bucket.wire_bytes:
        return True
    buffer = np.empty(bucket.wire_bytes, np.uint8)
    try:
        await store.get_into(manifest.key(number), 0, buffer)
    except StoreUnavailable:
        raise
    except StoreError:
        return False
    return await in_thread(is_published, bucket, 0, buffer)
