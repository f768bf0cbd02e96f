"""The state of a Megatron trainer: one safetensors file a rank, and the layout it belongs to.

Invariant: a trainer of the same layout goes on exactly; another layout is refused, naming both
(``tests/rollart/test_rollart_megatron_trainer.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollart.trainers.config import TrainerConfig

_NUMBERS = "trainer.msgpack"


class Layout(msgspec.Struct, frozen=True):
    """What decides which rank holds what."""

    data_parallel: int
    tensor_parallel: int
    pipeline_parallel: int
    distributed_optimizer: bool
    dtype: str

    @classmethod
    def of(cls, config: TrainerConfig) -> Layout:
        return cls(**{name: getattr(config, name) for name in cls.__struct_fields__})


class _Numbers(msgspec.Struct, frozen=True):
    version: int
    layout: Layout


def save_rank(
    folder: str | Path, rank: int, config: TrainerConfig, version: int, module: Any, optimizer: Any
) -> None:
    """Write this rank's part into an existing folder."""
    folder = Path(folder)
    tensors = {f"model.{name}": parameter for name, parameter in module.named_parameters()}
    for prefix, parameter, slots in _optimized(optimizer):
        tensors[f"{prefix}.main"] = parameter
        tensors |= {f"{prefix}.{slot}": value for slot, value in slots.items()}
    save_file({name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}, folder / _file(rank))
    if rank == 0:
        (folder / _NUMBERS).write_bytes(msgspec.msgpack.encode(_Numbers(version, Layout.of(config))))


@torch.no_grad()
def restore_rank(folder: str | Path, rank: int, config: TrainerConfig, module: Any, optimizer: Any) -> int:
    """Put this rank's part back; returns the version. Raises ValueError for another layout or a missing part."""
    folder = Path(folder)
    numbers = msgspec.msgpack.decode((folder / _NUMBERS).read_bytes(), type=_Numbers)
    if numbers.layout != Layout.of(config):
        raise ValueError(f"trainer state in {folder} is of {numbers.layout}, the trainer has {Layout.of(config)}")
    if not (folder / _file(rank)).exists():
        raise ValueError(f"trainer state in {folder} is incomplete; restore from another checkpoint")
    tensors = load_file(folder / _file(rank))
    for name, parameter in module.named_parameters():
        parameter.copy_(tensors[f"model.{name}"])
    for prefix, parameter, slots in _optimized(optimizer):
        parameter.copy_(tensors[f"{prefix}.main"])
        start = f"{prefix}."
        slots.update(
            {
                name.removeprefix(start): value if name.endswith(".step") else value.to(parameter.device)
                for name, value in tensors.items()
                if name.startswith(start) and not name.endswith(".main")
            }
        )
    return numbers.version


def _optimized(optimizer: Any) -> Iterator[tuple[str, Tensor, dict[str, Tensor]]]:
    """Every float32 parameter that this rank's optimizers step, and its state."""
    for number, part in enumerate(optimizer.chained_optimizers):
        inner = part.optimizer
        parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
        for index, parameter in enumerate(parameters):
            yield f"optimizer.{number}.{index}", parameter, inner.state[parameter]


def _file(rank: int) -> str:
    return f"trainer-{rank:05d}.safetensors"
