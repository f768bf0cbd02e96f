"""Published tensors as raw bytes, without copies where they are contiguous and on the host.

numpy arrays are handled here; torch tensors by `weightsync.torch`, which is imported only when one is seen.
A strided or device tensor is copied straight to where its bytes are wanted, and no more of it than is wanted
(`test_weightsync_tensors.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from weightsync.dtypes import ITEMSIZE
from weightsync.errors import BadTensor
from weightsync.manifest import Shard, TensorMeta

__all__ = ["NO_SHARDS", "Bytes", "NamedTensors", "Tensor", "describe", "fill", "raw"]

Bytes = npt.NDArray[np.uint8]
NamedTensors = Mapping[str, Any] | Iterable[tuple[str, Any]]
NO_SHARDS: Mapping[str, Shard] = {}


class _Source(Protocol):
    """What is needed of a tensor library."""

    def obstacle(self, tensor: Any) -> str:
        """Why the tensor cannot be carried, and what to do about it; empty if it can."""

    def dtype_name(self, tensor: Any) -> str: ...
    def identity(self, tensor: Any) -> tuple[Any, ...]: ...
    def raw(self, tensor: Any) -> Bytes | None:
        """A view of the tensor's bytes; None if it is strided or elsewhere."""

    def copy(self, tensor: Any, out: Bytes) -> None:
        """Write the tensor's bytes, in row-major order, into `out` of the same size."""


class _Numpy:
    def obstacle(self, tensor: npt.NDArray[Any]) -> str:
        if isinstance(tensor, np.ma.MaskedArray):
            return "has a mask, which would be lost: publish .filled()"
        return "" if tensor.dtype.isnative else "has a foreign byte order: publish .astype(dtype.newbyteorder('='))"

    def dtype_name(self, tensor: npt.NDArray[Any]) -> str:
        return _name(tensor.dtype)

    def identity(self, tensor: npt.NDArray[Any]) -> tuple[Any, ...]:
        return (tensor.__array_interface__["data"][0], tensor.strides)

    def raw(self, tensor: npt.NDArray[Any]) -> Bytes | None:
        return tensor.reshape(-1).view(np.uint8) if tensor.flags.c_contiguous else None

    def copy(self, tensor: npt.NDArray[Any], out: Bytes) -> None:
        np.copyto(out.view(tensor.dtype).reshape(tensor.shape), tensor)


_NUMPY = _Numpy()


@cache
def _name(dtype: np.dtype[Any]) -> str:
    return dtype.name


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
    if not isinstance(shards, Mapping):
        raise BadTensor(f"shards is a {type(shards).__name__}; give a mapping of names to Shards")
    for name, tensor in _pairs(named):
        source = _source(name, tensor)
        if obstacle := source.obstacle(tensor):
            raise BadTensor(f"tensor {name!r} {obstacle}")
        dtype, shape = source.dtype_name(tensor), tuple(tensor.shape)
        identity = (dtype, shape, *source.identity(tensor))
        # Empty tensors share the null address without being tied.
        tied = first.setdefault(identity, name) if math.prod(shape) else name
        metas.append(TensorMeta(name, dtype, shape, "" if tied == name else tied, shards.get(name)))
        tensors.append(tensor)
    for name in sorted(shards.keys() - {meta.name for meta in metas}):
        raise BadTensor(f"shards has {name!r}, which is not among the tensors; take it out, or publish it")
    return tuple(metas), tensors


def _pairs(named: NamedTensors) -> Iterator[tuple[str, Any]]:
    if not isinstance(named, Iterable) or isinstance(named, str | bytes):
        raise BadTensor(
            f"a {type(named).__name__} is no named tensors; publish a mapping of names to tensors, or pairs of them "
            "(of a torch module: weightsync.torch.named_tensors(module))"
        )
    for pair in named.items() if isinstance(named, Mapping) else named:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise BadTensor(f"{pair!r:.100} is no pair of a name and a tensor; publish those, or a mapping")
        yield pair[0], pair[1]


def raw(tensor: Any) -> Bytes | None:
    """A view of the tensor's bytes in row-major order; None if it is not contiguous on the host."""
    return _source("", tensor).raw(tensor)


def fill(tensor: Any, start: int, stop: int, out: Bytes) -> None:
    """Write bytes `[start, stop)` of the tensor in row-major order, whole elements, into `out`; reads no others."""
    source = _source("", tensor)
    whole = source.raw(tensor)
    if whole is not None:
        out[:] = whole[start:stop]
        return
    size = math.prod(tensor.shape) * ITEMSIZE[source.dtype_name(tensor)]
    if stop - start == size:
        source.copy(tensor, out)
        return
    row = size // tensor.shape[0]
    (first, into), (last, beyond) = divmod(start, row), divmod(stop, row)
    if first == last:
        fill(tensor[first], into, beyond, out)
        return
    head = row - into if into else 0
    if head:
        fill(tensor[first], into, row, out[:head])
        first += 1
    if first < last:
        source.copy(tensor[first:last], out[head : out.size - beyond])
    if beyond:
        fill(tensor[last], 0, beyond, out[out.size - beyond :])


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
