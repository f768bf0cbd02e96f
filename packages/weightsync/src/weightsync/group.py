"""Weights inside a cluster, by broadcast over a torch.distributed group: NCCL between GPUs, gloo between hosts.

For workers that stop together and sit on a fast network. It is a collective, not a store: all ranks call it, the
receivers wait for the source, and a rank that fails midway has mixed weights and must load a whole version, from a
store or by another broadcast. Every bucket has a checksum unless `verify` is off; checksums are computed on the host
(`test_weightsync_group.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from weightsync.blocking import in_thread
from weightsync.checksum import checksum
from weightsync.errors import CorruptBucket
from weightsync.manifest import Bucket, Manifest, Piece, Plan, TensorMeta
from weightsync.subscriber import Commit
from weightsync.tensors import NamedTensors, describe

__all__ = ["GroupSync"]


class GroupSync:
    """One end of a broadcast: `publish` on the source rank, `receive` on all others, at the same time.

    Tensors are torch tensors on `device` at both ends. Beyond the model each rank holds one bucket, and those tensors
    that reach over the end of one.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        source: int = 0,
        bucket_bytes: int = 256 << 20,
        device: str = "cpu",
        verify: bool = True,
    ) -> None:
        Plan((), bucket_bytes)
        self._group = group
        self._source = source
        self._bucket_bytes = bucket_bytes
        self._device = torch.device(device)
        self._verify = verify

    async def publish(self, version: int, named_tensors: NamedTensors) -> Manifest:
        return await in_thread(self._publish, version, named_tensors)

    async def receive(self, load: Callable[[str, torch.Tensor], None]) -> Commit:
        """Hand every published name to `load`, in a thread, as soon as its last byte is here."""
        start = asyncio.get_running_loop().time()
        manifest, size = await in_thread(self._receive, load)
        took = asyncio.get_running_loop().time() - start
        return Commit(manifest.version, manifest.digest, took, size, len(manifest.tensors))

    def _publish(self, version: int, named_tensors: NamedTensors) -> Manifest:
        metas, tensors = describe(named_tensors)
        plan, buckets = Plan(metas, self._bucket_bytes), []
        head = Manifest(version=version, attempt="", bucket_bytes=self._bucket_bytes, tensors=metas, buckets=())
        self._send(head.encode())
        for number, pieces in enumerate(plan.pieces()):
            data = torch.zeros(plan.size(number), dtype=torch.uint8, device=self._device)
            for index, start, stop, offset in pieces:
                data[offset : offset + stop - start] = _flat(tensors[index])[start:stop]
            dist.broadcast(data, self._source, self._group)
            digest = self._digest(data)
            self._send(digest.encode())
            buckets.append(Bucket(digest, data.numel(), digest))
        return msgspec.structs.replace(head, buckets=tuple(buckets))

    def _receive(self, load: Callable[[str, torch.Tensor], None]) -> tuple[Manifest, int]:
        head = msgspec.msgpack.decode(self._take(), type=Manifest)
        plan, buckets = Plan(head.tensors, head.bucket_bytes), []
        assembly = _Assembly(plan, load, self._device)
        for number, pieces in enumerate(plan.pieces()):
            data = torch.empty(plan.size(number), dtype=torch.uint8, device=self._device)
            dist.broadcast(data, self._source, self._group)
            expected, found = self._take().decode(), self._digest(data)
            if found != expected:
                raise CorruptBucket(f"bucket {number} of version {head.version} has checksum {found}, not {expected}")
            buckets.append(Bucket(found, data.numel(), found))
            assembly.take(pieces, data)
        assembly.end()
        return msgspec.structs.replace(head, buckets=tuple(buckets)), plan.total

    def _send(self, data: bytes) -> None:
        dist.broadcast(torch.tensor([len(data)], device=self._device), self._source, self._group)
        dist.broadcast(torch.tensor(list(data), dtype=torch.uint8, device=self._device), self._source, self._group)

    def _take(self) -> bytes:
        size = torch.zeros(1, dtype=torch.int64, device=self._device)
        dist.broadcast(size, self._source, self._group)
        data = torch.empty(int(size), dtype=torch.uint8, device=self._device)
        dist.broadcast(data, self._source, self._group)
        return data.cpu().numpy().tobytes()

    def _digest(self, data: torch.Tensor) -> str:
        return checksum([data.cpu().numpy()]) if self._verify else "unverified"


class _Assembly:
    """Puts pieces together and hands each tensor over when it is whole."""

    def __init__(self, plan: Plan, load: Callable[[str, torch.Tensor], None], device: torch.device) -> None:
        self._plan = plan
        self._load = load
        self._device = device
        self._parts: dict[int, torch.Tensor] = {}
        self._names = {meta.name: [meta.name] for meta in plan.tensors if not meta.tied_to}
        for meta in plan.tensors:
            if meta.tied_to:
                self._names[meta.tied_to].append(meta.name)

    def take(self, pieces: list[Piece], data: torch.Tensor) -> None:
        for index, start, stop, offset in pieces:
            meta, piece = self._plan.tensors[index], data[offset : offset + stop - start]
            if stop - start < meta.nbytes:
                if index not in self._parts:
                    self._parts[index] = torch.empty(meta.nbytes, dtype=torch.uint8, device=self._device)
                self._parts[index][start:stop] = piece
                piece = self._parts[index]
            if stop == meta.nbytes:
                self._hand_over(meta, piece)
                self._parts.pop(index, None)

    def end(self) -> None:
        """Tensors without elements lie in no bucket."""
        for meta in self._plan.tensors:
            if not meta.nbytes:
                self._load(meta.name, torch.empty(meta.shape, dtype=getattr(torch, meta.dtype), device=self._device))

    def _hand_over(self, meta: TensorMeta, data: torch.Tensor) -> None:
        tensor = data.view(getattr(torch, meta.dtype)).reshape(meta.shape)
        for name in self._names[meta.name]:
            self._load(name, tensor)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
