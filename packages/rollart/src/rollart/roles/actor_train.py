"""The training role: one rank of the trainer, and the publisher of the weights that it holds.

Invariants (tests/rollart/test_rollart_actor_train.py): what is published is what was held when it was asked for,
though training may go on meanwhile; train, copy, score and save run one after another, in the same order on every
rank, for all of them are collective.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rollart.distributed.decorators import register
from rollart.distributed.worker import Worker
from rollart.pipeline.ports import Push
from rollart.trainers.batch import TrainBatch
from rollart.trainers.config import TrainerConfig

if TYPE_CHECKING:
    from torch import Tensor

    from rollart.trainers.trainer import Trainer
    from weightsync import Shard


class ActorTrain(Worker):
    """Trains the model of a folder and publishes each version to a weight store."""

    def __init__(
        self,
        model: str,
        trainer: TrainerConfig,
        stores: Sequence[str],
        bucket_bytes: int,
        keep: int,
        restore: str | None,
        address: str = "",
    ) -> None:
        """`stores` has one for each rank. `address` is where the ranks meet, ``HOST:PORT`` of the first; one rank of
        the torch backend needs none."""
        self._model = model
        self._config = trainer
        self._stores = stores
        self._bucket_bytes = bucket_bytes
        self._keep = keep
        self._restore = restore
        self._address = address
        # The trainer is not thread-safe, and a copy reads the live weights.
        self._turn = asyncio.Lock()

    async def setup(self) -> None:
        """Load the model, or a checkpoint's state into it, and open the store."""
        from weightsync import Publisher, open_store

        self._trainer = await asyncio.to_thread(self._load)
        self._store = open_store(self._stores[self._rank])
        self._publisher = Publisher(self._store, bucket_bytes=self._bucket_bytes, keep=self._keep)

    async def close(self) -> None:
        await self._store.close()
        self._trainer.close()
        await asyncio.to_thread(_leave)

    @register(mode="execute_rank_zero")
    async def held_version(self) -> int:
        """The number of completed train steps."""
        return self._trainer.version

    @register(mode="execute_all")
    async def train_step(self, batch: TrainBatch) -> dict[str, float]:
        """Train on a batch; returns metrics. The version afterwards is one higher."""
        async with self._turn:
            return await asyncio.to_thread(self._trainer.train_step, batch, self._trainer.version)

    @register(mode="execute_all")
    async def publish(self, version: int) -> Push:
        """Publish what this rank holds of the weights, which must be those of `version`; returns once it is visible.

        No rank gathers another's part: readers put them together.
        """
        async with self._turn:
            if version != self._trainer.version:
                raise ValueError(f"version {version} was asked for, the trainer holds {self._trainer.version}")
            tensors, shards = await asyncio.to_thread(self._copy)
        manifest = await self._publisher.publish(version, tensors, shards)
        last = self._publisher.pushes[-1]
        return Push(version, last.seconds, last.wire_bytes, manifest.digest)

    @register(mode="execute_all")
    async def logprobs(
        self, prompts: list[list[int]], tokens: list[list[int]], allowed: Sequence[int] | None
    ) -> list[list[float]]:
        """The trainer's log-probabilities of `tokens` after `prompts`, limited to `allowed` ids, in nats."""
        async with self._turn:
            return await asyncio.to_thread(self._trainer.logprobs, prompts, tokens, allowed)

    @register(mode="execute_all")
    async def save(self, folder: str) -> None:
        """Write weights, optimizer and version into an existing folder."""
        async with self._turn:
            await asyncio.to_thread(self._trainer.save, folder)

    @register(mode="execute_all")
    async def export(self, folder: str) -> None:
        """Write a Hugging Face folder that transformers and vLLM load."""
        async with self._turn:
            await asyncio.to_thread(self._trainer.export, folder)

    @property
    def _rank(self) -> int:
        return self.info.rank if self._config.processes > 1 else 0

    def _copy(self) -> tuple[dict[str, Tensor], dict[str, Shard]]:
        """This rank's shards in host memory, so that the next train step need not wait for a slow store."""
        tensors, shards = self._trainer.shards()
        return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}, shards

    def _load(self) -> Trainer:
        import torch

        from rollart.trainers.backend import join, open_trainer

        if self._config.device == "cpu":
            torch.set_num_threads(1)
        join(self._config, self._rank, self._address)
        trainer = open_trainer(self._model, self._config)
        if self._restore is not None:
            trainer.restore(self._restore)
        return trainer


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
