"""Trainers, and the batches they take."""

from rollart.trainers.backend import open_trainer
from rollart.trainers.batch import TrainBatch, TrajectoryLike, TurnLike, build_batch
from rollart.trainers.config import TrainerConfig
from rollart.trainers.layout import check_layout
from rollart.trainers.model_folder import ModelFolder, ModelShape
from rollart.trainers.state import TrainerState
from rollart.trainers.torch_trainer import TorchTrainer
from rollart.trainers.trainer import Trainer

__all__ = [
    "ModelFolder",
    "ModelShape",
    "TorchTrainer",
    "TrainBatch",
    "Trainer",
    "TrainerConfig",
    "TrainerState",
    "TrajectoryLike",
    "TurnLike",
    "build_batch",
    "check_layout",
    "open_trainer",
]
