"""The state of a trainer, on disk as safetensors and msgpack: no pickle.

Invariant: saving and loading gives back every tensor bit by bit and every number
(``tests/rollart/test_rollart_trainer.py::test_restored_trainer_goes_on_exactly``). Shuffling needs no state: it is
drawn from (seed, step).
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

_TENSORS = "trainer.safetensors"
_NUMBERS = "trainer.msgpack"


class _Numbers(msgspec.Struct, frozen=True):
    version: int
    names: list[str]


class TrainerState(msgspec.Struct, frozen=True):
    """`tensors` hold ``model.NAME`` and ``optimizer.NAME.SLOT``, whole and on the CPU."""

    version: int
    tensors: dict[str, Tensor]

    def save(self, folder: str | Path) -> None:
        """Writes the state into an existing folder; the numbers come last and complete it."""
        folder = Path(folder)
        save_file(self.tensors, folder / _TENSORS)
        (folder / _NUMBERS).write_bytes(msgspec.msgpack.encode(_Numbers(self.version, sorted(self.tensors))))

    @classmethod
    def load(cls, folder: str | Path) -> TrainerState:
        folder = Path(folder)
        numbers = msgspec.msgpack.decode((folder / _NUMBERS).read_bytes(), type=_Numbers)
        tensors = load_file(folder / _TENSORS)
        if sorted(tensors) != numbers.names:
            raise ValueError(f"trainer state in {folder} is incomplete; restore from another checkpoint")
        return cls(numbers.version, tensors)


def read_state(model: nn.Module, optimizer: torch.optim.Optimizer, version: int) -> TrainerState:
    """Copies the state out. With several processes all must call this."""
    tensors = {f"model.{name}": _copy(tensor) for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for slot, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{name}.{slot}"] = _copy(value)
    return TrainerState(version, tensors)


def restore_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: TrainerState) -> int:
    """Puts a state into a model and an optimizer of the same shape, sharded or not; returns its version."""
    for name, tensor in model.state_dict().items():
        tensor.copy_(_like(tensor, state.tensors[f"model.{name}"]))
    optimizer.state.clear()
    for name, parameter in model.named_parameters():
        prefix = f"optimizer.{name}."
        slots = {key.removeprefix(prefix): value for key, value in state.tensors.items() if key.startswith(prefix)}
        if slots:
            optimizer.state[parameter] = {
                slot: value.clone() if slot == "step" else _like(parameter, value).clone().to(parameter.device)
                for slot, value in slots.items()
            }
    return state.version


def _copy(tensor: Tensor) -> Tensor:
    full = getattr(tensor, "full_tensor", None)
    return (full() if full is not None else tensor).detach().cpu().clone()


def _like(target: Tensor, whole: Tensor) -> Tensor:
    """`whole` sharded as `target` is."""
    mesh = getattr(target, "device_mesh", None)
    if mesh is None:
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, mesh, target.placements)
