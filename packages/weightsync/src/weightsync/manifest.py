"""The manifest of a version, and the plan of its buckets, which everyone derives from the manifest alone.

All tensors lie one after the other in one flat space, each at a multiple of `ALIGNMENT`; bucket `i` is bytes
`[i * bucket_bytes, (i + 1) * bucket_bytes)` of it. A tensor larger than a bucket is split by that, and because
bucket sizes are multiples of `ALIGNMENT`, no element ever is. Tied tensors (two names, one storage) lie there
once (`test_weightsync_manifest.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import xxhash

from weightsync.dtypes import ITEMSIZE
from weightsync.errors import BadManifest, BadTensor

__all__ = ["ALIGNMENT", "FORMAT", "Bucket", "Manifest", "Piece", "Plan", "Shard", "TensorMeta"]

# A cache line: enough for the widest element (complex128) and for vector loads straight from staging.
ALIGNMENT = 64
FORMAT = 1
# Not to be written as UTF-8.
_SURROGATE = re.compile("[\ud800-\udfff]")


class Shard(msgspec.Struct, frozen=True, array_like=True):
    """Which part of a larger tensor this is: from `start` along `dim`, of `size` in all."""

    dim: int
    start: int
    size: int


class TensorMeta(msgspec.Struct, frozen=True, array_like=True):
    """One published name; `tied_to` names the earlier tensor whose storage it shares."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    tied_to: str = ""
    shard: Shard | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


class Bucket(msgspec.Struct, frozen=True, array_like=True):
    """A bucket's content checksum, and the size and checksum of the object that brings it.

    With `delta` the object holds changes on the same bucket of the manifest's base version; no bytes, no change.
    `leaves` are the checksums that `digest` is made of, one for each `checksum.LEAF_BYTES` of content.
    """

    digest: str
    wire_bytes: int
    wire_digest: str
    delta: bool = False
    leaves: bytes = b""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """All that a reader needs to know about one version.

    Without `base` every object is its bucket's content (an anchor); with it, some are deltas on that version.
    Checksums of content are the same either way, so that a reader proves what it ended up with.
    """

    format: int = FORMAT
    version: int
    attempt: str
    bucket_bytes: int
    tensors: tuple[TensorMeta, ...]
    buckets: tuple[Bucket, ...]
    base: int | None = None
    density: float = 1.0

    @property
    def digest(self) -> str:
        """The identity of the content: every name, dtype, shape, tie and byte, however it was encoded."""
        layout = (self.bucket_bytes, self.tensors, tuple(bucket.digest for bucket in self.buckets))
        return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(layout))

    @property
    def wire_bytes(self) -> int:
        return sum(bucket.wire_bytes for bucket in self.buckets)

    def key(self, index: int) -> str:
        return bucket_key(self.version, self.attempt, index)

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes, key: str = "a manifest") -> Manifest:
        try:
            form = msgspec.msgpack.decode(data, type=_Format).format
            if form > FORMAT:
                raise BadManifest(f"{key}: format {form} is newer than {FORMAT}: update weightsync on the reader")
            manifest = msgspec.msgpack.decode(data, type=cls)
            plan = Plan(manifest.tensors, manifest.bucket_bytes)
        except (msgspec.DecodeError, BadTensor) as error:
            raise BadManifest(f"{key} does not decode: {error}; publish another version") from error
        if len(plan) != len(manifest.buckets):
            raise BadManifest(f"version {manifest.version}: {len(manifest.buckets)} buckets, planned {len(plan)}")
        return manifest


class _Format(msgspec.Struct):
    format: int


class Piece(NamedTuple):
    """Bytes `[start, stop)` of tensor number `tensor`, at `offset` in its bucket."""

    tensor: int
    start: int
    stop: int
    offset: int


class Plan:
    """Where each tensor lies in the flat space, and which pieces make up each bucket."""

    def __init__(self, tensors: Sequence[TensorMeta], bucket_bytes: int) -> None:
        if not isinstance(bucket_bytes, int) or bucket_bytes <= 0 or bucket_bytes % ALIGNMENT:
            raise BadTensor(f"bucket_bytes is {bucket_bytes}; it must be a positive multiple of {ALIGNMENT}")
        self.tensors = tensors
        self.bucket_bytes = bucket_bytes
        self.offsets: list[int] = []
        self._place(tensors)
        self._pieces: list[list[Piece]] | None = None
        self._runs: list[list[tuple[int, int]]] | None = None

    def _place(self, tensors: Sequence[TensorMeta]) -> None:
        seen: dict[str, int] = {}
        end = 0
        for number, meta in enumerate(tensors):
            _check(meta, seen, tensors)
            if meta.tied_to:
                self.offsets.append(self.offsets[seen[meta.tied_to]])
            else:
                self.offsets.append(end)
                end = _aligned(end + meta.nbytes)
            seen[meta.name] = number
        self.total = end

    def __len__(self) -> int:
        return -(-self.total // self.bucket_bytes)

    def size(self, index: int) -> int:
        """Content bytes of a bucket; only the last one is smaller than the others."""
        return min(self.bucket_bytes, self.total - index * self.bucket_bytes)

    def span(self, index: int) -> slice:
        """Where the bucket lies in the flat space."""
        return slice(index * self.bucket_bytes, index * self.bucket_bytes + self.size(index))

    @property
    def elements(self) -> int:
        return sum(math.prod(meta.shape) for meta in self.tensors if not meta.tied_to)

    def runs(self) -> list[list[tuple[int, int]]]:
        """Each bucket as stretches `(element size, bytes)` of equally wide elements, padding included."""
        if self._runs is None:
            self._runs = [self._stretches(index, pieces) for index, pieces in enumerate(self.pieces())]
        return self._runs

    def pieces(self) -> list[list[Piece]]:
        """The pieces of each bucket in order; what no piece covers is padding, and zero."""
        if self._pieces is None:
            self._pieces = self._cut()
        return self._pieces

    def _stretches(self, index: int, pieces: list[Piece]) -> list[tuple[int, int]]:
        # Elements of 16 bytes compare as two of 8.
        widths = [min(8, ITEMSIZE[self.tensors[piece.tensor].dtype]) for piece in pieces]
        ends = [piece.offset for piece in pieces[1:]] + [self.size(index)]
        merged: list[tuple[int, int]] = []
        for width, begin, end in zip(widths, [0, *ends[:-1]], ends, strict=True):
            if merged and merged[-1][0] == width:
                merged[-1] = (width, merged[-1][1] + end - begin)
            else:
                merged.append((width, end - begin))
        return merged

    def _cut(self) -> list[list[Piece]]:
        buckets: list[list[Piece]] = [[] for _ in range(len(self))]
        for number, (meta, offset) in enumerate(zip(self.tensors, self.offsets, strict=True)):
            if meta.tied_to:
                continue
            start, nbytes = 0, meta.nbytes
            while start < nbytes:
                index, into = divmod(offset + start, self.bucket_bytes)
                stop = min(nbytes, start + self.bucket_bytes - into)
                buckets[index].append(Piece(number, start, stop, into))
                start = stop
        return buckets


def _check(meta: TensorMeta, seen: dict[str, int], tensors: Sequence[TensorMeta]) -> None:
    if not isinstance(meta.name, str) or not meta.name or _SURROGATE.search(meta.name):
        raise BadTensor(f"a tensor's name is {meta.name!r}; use a text, not an empty name, and no surrogates")
    if meta.name in seen:
        raise BadTensor(f"tensor {meta.name!r} is published twice; names must be unique")
    if meta.dtype not in ITEMSIZE:
        raise BadTensor(f"tensor {meta.name!r} has unknown dtype {meta.dtype!r}; known: {', '.join(ITEMSIZE)}")
    if any(size < 0 for size in meta.shape):
        raise BadTensor(f"tensor {meta.name!r} has a negative size in shape {meta.shape}")
    if (part := meta.shard) is not None:
        if not isinstance(part, Shard) or any(
            type(n) is not int or n >= 1 << 63 for n in (part.dim, part.start, part.size)
        ):
            raise BadTensor(f"the shard of tensor {meta.name!r} is {part!r}; give a Shard of whole numbers")
        inside = 0 <= part.dim < len(meta.shape) and 0 <= part.start <= part.size - meta.shape[part.dim]
        if not inside:
            raise BadTensor(f"tensor {meta.name!r} of shape {meta.shape} cannot be {part}")
    if meta.tied_to:
        first = tensors[seen[meta.tied_to]] if meta.tied_to in seen else None
        if first is None or first.tied_to or (first.dtype, first.shape) != (meta.dtype, meta.shape):
            raise BadTensor(f"tensor {meta.name!r} is tied to {meta.tied_to!r}, which is not its equal before it")


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def manifest_key(version: int) -> str:
    return f"v{version}.manifest"


def bucket_key(version: int, attempt: str, index: int) -> str:
    """The attempt makes the keys of a dead publisher's leftovers differ from those of its successor."""
    return f"v{version}.{attempt}.{index}"
