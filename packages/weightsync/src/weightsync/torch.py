"""Torch tensors and modules, at both ends: `named_tensors(module)` to publish, `load_into(module)` to load."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from weightsync.errors import BadTensor
from weightsync.manifest import TensorMeta
from weightsync.tensors import Bytes, Tensor

__all__ = ["SOURCE", "ModuleLoad", "load_into", "named_tensors", "view"]


# Bits are copied as integers, so that no conversion can touch them.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Torch:
    def obstacle(self, tensor: torch.Tensor) -> str:
        if hasattr(tensor, "to_local"):
            return "is distributed: publish .full_tensor(), or .to_local() with shards="
        if tensor.layout is not torch.strided:
            return f"has layout {tensor.layout}: publish .to_dense()"
        return "is on the meta device and has no data: materialize it first" if tensor.is_meta else ""

    def dtype_name(self, tensor: torch.Tensor) -> str:
        return _name(tensor.dtype)

    def identity(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        return (tensor.device, tensor.data_ptr(), tensor.stride(), tensor.is_conj(), tensor.is_neg())

    def raw(self, tensor: torch.Tensor) -> Bytes | None:
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return None
        return tensor.detach().reshape(-1).view(torch.uint8).numpy()

    def copy(self, tensor: torch.Tensor, out: Bytes) -> None:
        kind = _WORDS.get(tensor.element_size(), tensor.dtype)
        source = tensor.detach().resolve_conj().resolve_neg().view(kind)
        torch.from_numpy(out).view(kind).view(source.shape).copy_(source)


@cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


SOURCE = _Torch()


def view(tensor: Tensor) -> torch.Tensor:
    """A staged tensor as a torch tensor that shares its memory."""
    dtype = getattr(torch, tensor.meta.dtype)
    if not math.prod(tensor.meta.shape):
        return torch.empty(tensor.meta.shape, dtype=dtype)
    return torch.frombuffer(tensor.data, dtype=dtype).view(tensor.meta.shape)


def named_tensors(module: torch.nn.Module, rename: Callable[[str], str] | None = None) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers, tied ones under every name; `rename` maps names to published ones."""
    state = module.state_dict(keep_vars=True)
    names = {name: rename(name) if rename else name for name in state}
    if len(set(names.values())) != len(names):
        twice = sorted(name for name in names.values() if list(names.values()).count(name) > 1)
        raise BadTensor(f"the name map gives {twice[0]!r} to two tensors; published names must be unique")
    return {names[name]: tensor.detach() for name, tensor in state.items()}


class ModuleLoad:
    """A `load` for `Subscriber.commit` that copies into a module in place.

    `check` refuses a version that does not fit the module before anything is loaded.
    """

    def __init__(self, targets: dict[str, torch.Tensor]) -> None:
        self._targets = targets

    def check(self, metas: Sequence[TensorMeta]) -> None:
        for name in sorted(self._targets.keys() - {meta.name for meta in metas}):
            raise BadTensor(f"the version does not bring tensor {name!r}; nothing was loaded")
        for meta in metas:
            target = self._targets.get(meta.name)
            if target is None:
                raise BadTensor(f"the module has no tensor {meta.name!r}; publish what it has, or pass rename")
            if target.shape != meta.shape or _name(target.dtype) != meta.dtype:
                raise BadTensor(
                    f"{meta.name!r} is {meta.dtype}{list(meta.shape)}, the module has "
                    f"{_name(target.dtype)}{list(target.shape)}; nothing was loaded"
                )

    def __call__(self, name: str, tensor: Tensor) -> None:
        target, tied_to = self._targets[name], tensor.meta.tied_to
        if not tied_to or target.data_ptr() != self._targets[tied_to].data_ptr():
            target.copy_(view(tensor))


def load_into(module: torch.nn.Module, rename: Callable[[str], str] | None = None) -> ModuleLoad:
    """A `load` for `Subscriber.commit` that fills the module; `rename` maps names as in `named_tensors`."""
    return ModuleLoad(named_tensors(module, rename))
