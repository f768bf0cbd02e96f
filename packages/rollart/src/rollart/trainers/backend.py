"""From a configuration to a trainer: the process group, the device, and the backend that was asked for."""

from __future__ import annotations

from pathlib import Path

from rollart.trainers.config import TrainerConfig
from rollart.trainers.trainer import Trainer


def join(config: TrainerConfig, rank: int, address: str) -> None:
    """Make this process rank `rank` of the trainer, on its device; `address` is ``HOST:PORT`` of rank 0.

    A torch trainer of one process needs no group. The caller destroys the group (`torch.distributed`) at the end.
    """
    import torch
    import torch.distributed as dist

    if config.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    if config.processes > 1 or config.backend == "megatron":
        backend = "nccl" if config.device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"tcp://{address}", rank=rank, world_size=config.processes)


def open_trainer(model_dir: str | Path, config: TrainerConfig) -> Trainer:
    """The configured trainer of a Hugging Face folder, in a process that has joined its group."""
    if config.backend == "megatron":
        from rollart.trainers.megatron_trainer import MegatronTrainer

        return MegatronTrainer(model_dir, config)
    from rollart.trainers.torch_trainer import TorchTrainer

    return TorchTrainer(model_dir, config)
