"""Weights between two processes on one GPU: the reader maps the publisher's memory, and copies on the device.

For a trainer and an engine that share a GPU and take turns; nothing passes the host. What travels is an offer: CUDA
IPC handles and the layout of the tensors, as plain values that are never unpickled. The tensors must stay as they are
until the reader's `take` has returned (`test_weightsync_ipc.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import torch

from weightsync.errors import BadManifest, BadTensor

__all__ = ["Offer", "SharedStorage", "SharedTensor", "offer", "take"]


class SharedStorage(msgspec.Struct, frozen=True, array_like=True):
    """What CUDA needs to map an allocation of another process, in the order in which torch gives and takes it."""

    handle: bytes
    nbytes: int
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    synchronize: bool


class SharedTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor in storage number `storage`; None where it has no elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: int | None


class Offer(msgspec.Struct, frozen=True):
    """One version in the memory of the device with this UUID."""

    version: int
    device: str
    storages: tuple[SharedStorage, ...]
    tensors: tuple[SharedTensor, ...]


def offer(version: int, tensors: Mapping[str, torch.Tensor]) -> bytes:
    """The version's tensors for a process on the same GPU; tied ones are mapped once."""
    storages: list[SharedStorage] = []
    numbers: dict[int, int] = {}
    shared = []
    for name, tensor in tensors.items():
        if not tensor.is_cuda:
            raise BadTensor(f"tensor {name!r} is on {tensor.device}; only what is on a GPU can be offered")
        storage, number = tensor.untyped_storage(), None
        if tensor.numel():
            number = numbers.setdefault(storage.data_ptr(), len(storages))
            if number == len(storages):
                storages.append(_shared(storage))
        dtype = str(tensor.dtype).removeprefix("torch.")
        shared.append(
            SharedTensor(name, dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), number)
        )
    devices = {_uuid(tensor.device.index) for tensor in tensors.values()}
    if len(devices) != 1:
        raise BadTensor(f"the tensors are on {len(devices)} devices; offer those of each by themselves")
    return msgspec.msgpack.encode(Offer(version, devices.pop(), tuple(storages), tuple(shared)))


def take(data: bytes, load: Callable[[str, torch.Tensor], None], device: int | None = None) -> int:
    """Hand every offered tensor to `load`, which copies what it keeps; returns the version.

    `device` is the GPU by this process's count, the current one if not given. Raises BadTensor when the offer is of
    another GPU, BadManifest when it does not decode.
    """
    try:
        offered = msgspec.msgpack.decode(data, type=Offer)
    except msgspec.DecodeError as error:
        raise BadManifest(f"the offer does not decode: {error}") from error
    index = torch.cuda.current_device() if device is None else device
    if (here := _uuid(index)) != offered.device:
        raise BadTensor(f"version {offered.version} is on GPU {offered.device}, this process is on {here}")
    storages = [_opened(shared, index) for shared in offered.storages]
    for tensor in offered.tensors:
        dtype = getattr(torch, tensor.dtype)
        if tensor.storage is None:
            load(tensor.name, torch.empty(tensor.shape, dtype=dtype, device=_device(index)))
            continue
        storage = storages[tensor.storage]
        whole = torch.empty(0, dtype=dtype, device=storage.device)
        load(tensor.name, whole.set_(storage, tensor.offset, tensor.shape, tensor.stride))
    _finish(index)
    return offered.version


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _device(index: int) -> torch.device:
    return torch.device("cuda", index)


def _shared(storage: torch.UntypedStorage) -> SharedStorage:
    _, handle, nbytes, offset, counter, counter_offset, event, synchronize = storage._share_cuda_()
    return SharedStorage(handle, nbytes, offset, counter, counter_offset, event, bool(synchronize))


def _opened(shared: SharedStorage, index: int) -> torch.UntypedStorage:
    return torch.UntypedStorage._new_shared_cuda(index, *msgspec.structs.astuple(shared))


def _finish(index: int) -> None:
    """The copies are done before the publisher may change what they are made from."""
    torch.cuda.synchronize(index)
