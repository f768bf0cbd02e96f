"""The training role: one trainer and the publisher of its weights, in one process.

Invariant: the weights do not change while they are published; train, publish, score and save run one after
another (tests/rollart/test_rollart_actor_train.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rollart.distributed.decorators import register
from rollart.distributed.worker import Worker
from rollart.pipeline.ports import Push
from rollart.trainers.batch import TrainBatch
from rollart.trainers.config import TrainerConfig

if TYPE_CHECKING:
    from rollart.trainers.torch_trainer import TorchTrainer


class ActorTrain(Worker):
    """Trains the model of a folder and publishes each version to a weight store."""

    def __init__(
        self, model: str, trainer: TrainerConfig, store: str, bucket_bytes: int, keep: int, restore: str | None
    ) -> None:
        self._model = model
        self._config = trainer
        self._store_url = store
        self._bucket_bytes = bucket_bytes
        self._keep = keep
        self._restore = restore
        # The trainer is not thread-safe, and publishing reads the live weights.
        self._turn = asyncio.Lock()

    async def setup(self) -> None:
        """Load the model, or a checkpoint's state into it, and open the store."""
        from weightsync import Publisher, open_store

        self._trainer = await asyncio.to_thread(self._load)
        self._store = open_store(self._store_url)
        self._publisher = Publisher(self._store, bucket_bytes=self._bucket_bytes, keep=self._keep)

    async def close(self) -> None:
        await self._store.close()

    @register(mode="execute_rank_zero")
    async def held_version(self) -> int:
        """The number of completed train steps."""
        return self._trainer.version

    @register(mode="execute_all")
    async def train_step(self, batch: TrainBatch) -> dict[str, float]:
        """Train on a batch; returns metrics. The version afterwards is one higher."""
        async with self._turn:
            return await asyncio.to_thread(self._trainer.train_step, batch, self._trainer.version)

    @register(mode="execute_rank_zero")
    async def publish(self, version: int) -> Push:
        """Publish the weights, which must be those of `version`, and return once they are visible."""
        async with self._turn:
            if version != self._trainer.version:
                raise ValueError(f"version {version} was asked for, the trainer holds {self._trainer.version}")
            manifest = await self._publisher.publish(version, self._trainer.named_tensors())
            last = self._publisher.pushes[-1]
            return Push(version, last.seconds, last.wire_bytes, manifest.digest)

    @register(mode="execute_rank_zero")
    async def logprobs(
        self, prompts: list[list[int]], tokens: list[list[int]], allowed: Sequence[int] | None
    ) -> list[list[float]]:
        """The trainer's log-probabilities of `tokens` after `prompts`, limited to `allowed` ids, in nats."""
        async with self._turn:
            return await asyncio.to_thread(self._trainer.logprobs, prompts, tokens, allowed)

    @register(mode="execute_rank_zero")
    async def save(self, folder: str) -> None:
        """Write weights, optimizer and version into an existing folder."""
        async with self._turn:
            await asyncio.to_thread(lambda: self._trainer.state_dict().save(folder))

    def _load(self) -> TorchTrainer:
        import torch

        from rollart.trainers.state import TrainerState
        from rollart.trainers.torch_trainer import TorchTrainer

        torch.set_num_threads(1)
        trainer = TorchTrainer(self._model, self._config)
        if self._restore is not None:
            trainer.load_state_dict(TrainerState.load(Path(self._restore)))
        return trainer
