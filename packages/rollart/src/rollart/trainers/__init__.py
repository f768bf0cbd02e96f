"""Trainers, and the batches they take."""

from rollart.trainers.batch import TrainBatch, TrajectoryLike, TurnLike, build_batch
from rollart.trainers.config import TrainerConfig
from rollart.trainers.state import TrainerState
from rollart.trainers.torch_trainer import TorchTrainer

__all__ = [
    "TorchTrainer",
    "TrainBatch",
    "TrainerConfig",
    "TrainerState",
    "TrajectoryLike",
    "TurnLike",
    "build_batch",
]
