"""Published tensors as raw bytes, without copies where they are contiguous and on the host.

numpy arrays are handled here; torch tensors by `weightsync.torch`, which is imported only when one is seen.
A strided or device tensor is copied piece by piece, so that a publisher never holds more than the buckets in
flight (`test_weightsync_tensors.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from weightsync.dtypes import ITEMSIZE
from weightsync.errors import BadTensor
from weightsync.manifest import Shard, TensorMeta

__all__ = ["NO_SHARDS", "Bytes", "NamedTensors", "Tensor", "describe", "piece"]

Bytes = npt.NDArray[np.uint8]
NamedTensors = Mapping[str, Any] | Iterable[tuple[str, Any]]
NO_SHARDS: Mapping[str, Shard] = {}


class _Source(Protocol):
    """What `describe` needs of a tensor library: identity of the storage, dtype name, contiguous bytes."""

    def dtype_name(self, tensor: Any) -> str: ...
    def identity(self, tensor: Any) -> tuple[Any, ...]: ...
    def raw(self, tensor: Any) -> Bytes: ...


class _Numpy:
    def dtype_name(self, tensor: npt.NDArray[Any]) -> str:
        return tensor.dtype.name if tensor.dtype.isnative else f"{tensor.dtype.name} (foreign byte order)"

    def identity(self, tensor: npt.NDArray[Any]) -> tuple[Any, ...]:
        return (tensor.__array_interface__["data"][0], tensor.strides)

    def raw(self, tensor: npt.NDArray[Any]) -> Bytes:
        return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)


_NUMPY = _Numpy()


def _source(name: str, tensor: Any) -> _Source:
    if isinstance(tensor, np.ndarray):
        return _NUMPY
    if hasattr(tensor, "untyped_storage"):
        from weightsync import torch

        return torch.SOURCE
    raise BadTensor(f"{name!r} is a {type(tensor).__name__}; publish numpy arrays or torch tensors")


def describe(
    named: NamedTensors, shards: Mapping[str, Shard] = NO_SHARDS
) -> tuple[tuple[TensorMeta, ...], list[Any]]:
    """The metadata of the tensors in the order given, ties found by storage, and the tensors themselves."""
    metas: list[TensorMeta] = []
    tensors: list[Any] = []
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in named.items() if isinstance(named, Mapping) else named:
        source = _source(name, tensor)
        dtype, shape = source.dtype_name(tensor), tuple(tensor.shape)
        identity = (dtype, shape, *source.identity(tensor))
        # Empty tensors share the null address without being tied.
        tied = first.setdefault(identity, name) if math.prod(shape) else name
        metas.append(TensorMeta(name, dtype, shape, "" if tied == name else tied, shards.get(name)))
        tensors.append(tensor)
    return tuple(metas), tensors


def piece(name: str, tensor: Any, start: int, stop: int) -> Bytes:
    """Bytes `[start, stop)` of the tensor in row-major order; a view when the tensor is contiguous on the host."""
    source = _source(name, tensor)
    if not tensor.shape:
        return source.raw(tensor.reshape(1))[start:stop]
    row = math.prod(tensor.shape[1:]) * ITEMSIZE[source.dtype_name(tensor)]
    first, last = start // row, -(-stop // row)
    return source.raw(tensor[first:last])[start - first * row : stop - first * row]


class Tensor:
    """A tensor as it is handed to `load`: its metadata and its bytes, in staging memory that will be reused.

    Whoever wants to keep it copies it; `numpy()` and `torch()` are views.
    """

    __slots__ = ("data", "meta")

    def __init__(self, meta: TensorMeta, data: Bytes) -> None:
        self.meta = meta
        self.data = data

    def numpy(self) -> npt.NDArray[Any]:
        try:
            dtype = np.dtype(self.meta.dtype)
        except TypeError:
            raise BadTensor(
                f"numpy has no {self.meta.dtype} for tensor {self.meta.name!r}; use .torch() or .data"
            ) from None
        return self.data.view(dtype).reshape(self.meta.shape)

    def torch(self) -> Any:
        from weightsync import torch

        return torch.view(self)
