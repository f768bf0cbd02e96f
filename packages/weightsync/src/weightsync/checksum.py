"""Checksums of everything that travels: xxh3, 128 bits.

Content is summed leaf by leaf, so that a reader can prove a part of a bucket; the digest of a bucket is that of its
leaves. What else is sent, is summed whole (`test_weightsync_manifest.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import xxhash

from weightsync.tensors import Bytes

__all__ = ["LEAF_BYTES", "checksum", "leaves", "leaves_of", "root"]

# What a reader of a part fetches too much at either end, against 16 bytes in the manifest.
LEAF_BYTES = 1 << 20
_DIGEST_BYTES = 16


def checksum(parts: Sequence[Bytes]) -> str:
    hasher = xxhash.xxh3_128()
    for part in parts:
        hasher.update(part.data)
    return hasher.hexdigest()


def leaves(parts: Iterable[Bytes]) -> bytes:
    """The digests, one after the other, of each `LEAF_BYTES` of the concatenated parts."""
    return b"".join(_digests(parts))


def leaves_of(digests: bytes, start: int, stop: int) -> bytes:
    """Of a bucket's leaves those of its bytes `[start, stop)`; `start` is where a leaf begins."""
    return digests[start // LEAF_BYTES * _DIGEST_BYTES : -(-stop // LEAF_BYTES) * _DIGEST_BYTES]


def root(digests: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(digests)


def _digests(parts: Iterable[Bytes]) -> Iterator[bytes]:
    hasher, room = xxhash.xxh3_128(), LEAF_BYTES
    for part in parts:
        view = part.data
        while len(view) >= room:
            hasher.update(view[:room])
            yield hasher.digest()
            hasher, view, room = xxhash.xxh3_128(), view[room:], LEAF_BYTES
        hasher.update(view)
        room -= len(view)
    if room < LEAF_BYTES:
        yield hasher.digest()
