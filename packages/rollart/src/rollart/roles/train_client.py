"""The driver's face of the training role: finished groups in, versions out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollart.algorithms import AdvantageName
from rollart.pipeline.ports import Push, Trained
from rollart.trainers.batch import build_batch
from samplebuffer import Batch
from weightsync import combined


class TrainClient:
    """Turns a batch of the sample buffer into arrays and calls the trainer's cluster."""

    def __init__(
        self,
        cluster: Any,
        allowed: Mapping[str, Sequence[int]],
        version: int,
        advantage: AdvantageName = "group_normalized",
    ) -> None:
        """`allowed` are the token ids that each task's generations were limited to."""
        self._cluster = cluster
        self._advantage = advantage
        self._allowed = allowed
        self.version = version

    async def train_step(self, batch: Batch, step: int) -> Trained:
        groups = [[sample.payload for sample in group.samples] for group in batch.groups]
        unknown = {sample.payload.task for sample in batch.samples} - self._allowed.keys()
        if unknown:
            raise ValueError(f"the batch holds tasks {sorted(unknown)}, whose allowed tokens are not known")
        arrays = build_batch(groups, advantage=self._advantage, allowed=self._allowed)
        metrics = await self._cluster.train_step(arrays)
        self.version += 1
        return Trained(self.version, metrics[0])

    async def publish(self, version: int) -> Push:
        """Every rank publishes its part; the version is there when the slowest has."""
        pushes: list[Push] = await self._cluster.publish(version)
        ranks = tuple(push.nbytes for push in pushes)
        return Push(
            version,
            max(push.seconds for push in pushes),
            sum(ranks),
            combined([push.digest for push in pushes]),
            ranks,
        )

    async def logprobs(
        self, prompts: list[list[int]], tokens: list[list[int]], allowed: Sequence[int] | None
    ) -> list[list[float]]:
        scored: list[list[list[float]]] = await self._cluster.logprobs(prompts, tokens, allowed)
        return scored[0]

    async def save(self, folder: Path) -> None:
        await self._cluster.save(str(folder))

    async def export(self, folder: Path) -> None:
        """Write a Hugging Face folder of the trained weights."""
        await self._cluster.export(str(folder))
