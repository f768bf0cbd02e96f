"""Megatron-Core 0.16 on a machine without GPUs: import this before it.

Megatron names CUDA as the device of its buffers, streams and random states, though nothing of what a dense model
needs depends on CUDA. Here those names are given CPU meanings, for the whole process: a trainer's process does
nothing else. With GPUs this module is not imported.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch

_CPU = torch.device("cpu")
_FACTORIES = ("zeros", "ones", "empty", "full", "tensor", "arange")


class _NoStream:
    """A CUDA stream where everything happens at once."""

    def __init__(self, *arguments: Any, **options: Any) -> None: ...
    def wait_stream(self, *arguments: Any) -> None: ...
    def synchronize(self) -> None: ...


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """The factory, making on the CPU what was asked for on CUDA."""

    @functools.wraps(factory)
    def made(*arguments: Any, **options: Any) -> Any:
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = _CPU
        return factory(*arguments, **options)

    return made


def _replace_cuda() -> None:
    # Each its own function: torch's compiler refuses one object under two names.
    cuda = torch.cuda
    cuda.current_device = lambda: _CPU
    cuda.synchronize = lambda *_, **__: None
    cuda.empty_cache = lambda *_, **__: None
    cuda.manual_seed = lambda *_, **__: None
    cuda.Stream = _NoStream
    cuda.current_stream = lambda *_, **__: _NoStream()
    cuda.default_stream = lambda *_, **__: _NoStream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    named = torch.Tensor.type

    def type_name(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        """Megatron's optimizers tell types apart by the name that a CUDA tensor has."""
        if arguments or options:
            return named(tensor, *arguments, **options)
        return named(tensor).replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = type_name


def _replace_random_states() -> None:
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
# Megatron says at import which of the CUDA extensions it misses.
logging.getLogger("megatron").setLevel(logging.ERROR)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    _replace_cuda()
    # Megatron compiles its fusions when it is imported, which takes long; on the CPU none of them is used.
    compiled, torch.compile = torch.compile, lambda function: function
    _replace_random_states()
    torch.compile = compiled
