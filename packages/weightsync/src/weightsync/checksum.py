"""The checksum of everything that travels: xxh3, 128 bits, as hex."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from weightsync.tensors import Bytes

__all__ = ["checksum"]


def checksum(parts: Sequence[Bytes]) -> str:
    hasher = xxhash.xxh3_128()
    for part in parts:
        hasher.update(part.data)
    return hasher.hexdigest()
