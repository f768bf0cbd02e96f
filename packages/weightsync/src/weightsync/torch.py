"""Torch tensors and modules, at both ends: `named_tensors(module)` to publish, `load_into(module)` to load."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from weightsync.errors import BadTensor
from weightsync.tensors import Bytes, Tensor

__all__ = ["SOURCE", "ModuleLoad", "load_into", "named_tensors", "view"]


class _Torch:
    def dtype_name(self, tensor: torch.Tensor) -> str:
        name = str(tensor.dtype).removeprefix("torch.")
        return name if tensor.layout is torch.strided else f"{name} ({tensor.layout})"

    def identity(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        return (str(tensor.device), tensor.data_ptr(), tensor.stride(), tensor.is_conj(), tensor.is_neg())

    def raw(self, tensor: torch.Tensor) -> Bytes:
        host = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
        return host.reshape(-1).view(torch.uint8).numpy()


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

    `names` are the tensors it must be given: a commit whose version lacks one is refused before anything is loaded.
    """

    def __init__(self, targets: dict[str, torch.Tensor]) -> None:
        self._targets = targets
        self.names = frozenset(targets)

    @torch.no_grad()
    def __call__(self, name: str, tensor: Tensor) -> None:
        if name not in self._targets:
            raise BadTensor(f"the module has no tensor {name!r}; publish what it has, or pass rename")
        target = self._targets[name]
        if (SOURCE.dtype_name(target), tuple(target.shape)) != (tensor.meta.dtype, tensor.meta.shape):
            raise BadTensor(
                f"{name!r} is {tensor.meta.dtype}{list(tensor.meta.shape)}, "
                f"the module has {SOURCE.dtype_name(target)}{list(target.shape)}"
            )
        if not tensor.meta.tied_to or target.data_ptr() != self._targets[tensor.meta.tied_to].data_ptr():
            target.copy_(view(tensor))


def load_into(module: torch.nn.Module, rename: Callable[[str], str] | None = None) -> ModuleLoad:
    """A `load` for `Subscriber.commit` that fills the module; `rename` maps names as in `named_tensors`."""
    return ModuleLoad(named_tensors(module, rename))
