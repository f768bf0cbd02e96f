"""What every trainer does with a batch; a backend adds the model, its gradient step and its weights.

A train step scores the batch where the loss asks for it (proximal policy, reference model), then makes one optimizer
update per minibatch, `ppo_epochs` times over. It is one version, however many updates it holds.

Invariants
- A train step is a function of (weights, optimizer state, batch, step), so a restored trainer goes on exactly
  (``test_restored_trainer_goes_on_exactly``).
- Several processes compute what one does (``test_two_processes_equal_one``): each is given the whole batch, takes its
  share of rows, and weights each token by its share of the *whole* minibatch.
- `version` counts completed train steps, and a step that is skipped or repeated is refused
  (``test_steps_come_in_order``).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rollart.algorithms import ObjectiveConfig, Tokens, aggregation_weights, keep_mask, objective, own_loss
from rollart.errors import Diverged
from rollart.trainers.batch import TrainBatch
from rollart.trainers.config import TrainerConfig
from rollart.trainers.micro_batch import MicroBatch, Rows, share
from rollart.trainers.model_folder import ModelFolder
from rollart.trainers.schedule import minibatches
from weightsync import Shard

Metrics = dict[str, float]

_CALMER = "lower train.lr or train.grad_clip, or clip with train.objective.clip_high, and resume"


class Update:
    """One optimizer update: what each micro-batch adds to the loss and to the metrics."""

    def __init__(self, config: ObjectiveConfig, batch: TrainBatch, tokens: Tokens, rows: Rows) -> None:
        index = torch.from_numpy(rows)
        self._config = config
        self._tokens = tokens
        self._weights = torch.zeros(batch.input_ids.shape)
        self._weights[index] = aggregation_weights(
            config.aggregation, keep_mask(config, tokens)[index], torch.from_numpy(batch.trajectory[rows])
        )
        self._sums: dict[str, Tensor] = {}

    def loss(self, micro: MicroBatch, logprobs: Tensor, entropy: Tensor) -> Tensor:
        """The micro-batch's part of the minibatch's loss; the parts of all ranks add up to the whole."""
        device, place = logprobs.device, micro.place
        weights = self._weights[place].to(device) * micro.counts
        total, metrics = objective(self._config, logprobs, entropy, _pick(self._tokens, place, device), weights)
        for name, value in metrics.items():
            before = self._sums.get(name, torch.zeros_like(value))
            self._sums[name] = torch.maximum(before, value) if name.endswith("_max") else before + value
        return total

    @property
    def metrics(self) -> Metrics:
        """What this rank's micro-batches came to."""
        return {name: float(value) for name, value in self._sums.items()}


class Trainer(ABC):
    """A model, its optimizer and its version. With several processes every method is collective."""

    def __init__(self, model_dir: str | Path, config: TrainerConfig) -> None:
        self.config = config
        if ":" in config.objective.loss:
            own_loss(config.objective.loss)  # what cannot be imported here ends the run before it begins
        self.version = 0
        self.folder = ModelFolder.read(model_dir)
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.device = torch.device("cpu")
        if config.device == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())

    def train_step(self, batch: TrainBatch, step: int) -> Metrics:
        """One pass of updates per epoch over `batch`; `step` must be the current version. Returns means of metrics.

        Raises ValueError for any other step, Diverged when a gradient is not finite.
        """
        if step != self.version:
            raise ValueError(f"step is {step}; the next train step of this trainer is {self.version}")
        rate = self.config.learning_rate(step)
        for group in self._optimizer_groups():
            group["lr"] = rate
        tokens = self._tokens(batch)
        allowed = self._allowed(batch)
        updates: list[Metrics] = []
        norms: list[float] = []
        for rows in minibatches(batch, self.config, step):
            update = Update(self.config.objective, batch, tokens, rows)
            norms.append(self._update(self._share(batch, rows), allowed, update))
            if not math.isfinite(norms[-1]):
                raise Diverged(f"train step {step}: the gradient's norm is {norms[-1]}; {_CALMER}")
            updates.append(update.metrics)
        self.version += 1
        merged = self._merged(updates)
        metrics = {
            name: float(np.max(values) if name.endswith("_max") else np.mean(values))
            for name, values in ((name, [update[name] for update in merged]) for name in merged[0])
        }
        return {
            **metrics,
            "grad_norm": float(np.mean(norms)),
            "lr": rate,
            "tokens": float(batch.trained_tokens),
            "updates": float(len(merged)),
        }

    def logprobs(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
        allowed: Sequence[int] | None = None,
    ) -> list[list[float]]:
        """The model's log-probabilities of `tokens` after `prompts`, in nats, after the mask to `allowed`."""
        batch = _as_batch(prompts, tokens, tuple(allowed or ()))
        scored = self.score(batch).numpy()
        return [row[columns].tolist() for row, columns in zip(scored, batch.loss_mask, strict=True)]

    def score(self, batch: TrainBatch, *, reference: bool = False) -> Tensor:
        """Log-probabilities of every trained token under this model or the reference one, [rows, tokens]."""
        result = torch.zeros(batch.input_ids.shape)
        micros = self._share(batch, batch.trained_rows)
        for micro, values in zip(micros, self._forward(micros, self._allowed(batch), reference), strict=True):
            if micro.counts and values is not None:
                result[micro.place] = values.float().cpu()
        return self._summed(result)

    def named_tensors(self) -> dict[str, Tensor]:
        """The weights by Hugging Face name, whole. They may alias the live ones: use them before the next step."""
        return dict(self.stream())

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """The weights by Hugging Face name, each whole, one at a time, in the type that is published."""
        for name, tensor in self._weights():
            yield name, self._published(tensor)

    def close(self) -> None:  # noqa: B027  (most keep nothing)
        """Let go of what the backend keeps in the process. The process group stays: it is the caller's."""

    @abstractmethod
    def shards(self) -> tuple[dict[str, Tensor], dict[str, Shard]]:
        """What this rank holds of the weights, by Hugging Face name, and which part of which tensor that is.

        For `weightsync.Publisher.publish` on every rank, each to a store of its own; no rank gathers anything, and
        what a `weightsync.ShardedSubscriber` puts together is the whole. Ranks that hold the same share it out.
        """

    @abstractmethod
    def save(self, folder: str | Path) -> None:
        """Write weights, optimizer state and version into an existing folder."""

    @abstractmethod
    def restore(self, folder: str | Path) -> None:
        """Go on from what `save` wrote. Raises ValueError when it is incomplete or of another layout."""

    def export(self, folder: str | Path) -> None:
        """Write a Hugging Face folder that transformers and vLLM load: names and types are the original folder's."""
        self.folder.write(folder, self._weights(), writes=self.rank == 0)
        if self.world > 1:
            dist.barrier()

    @abstractmethod
    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights by Hugging Face name, each whole, one at a time, as precise as they are held."""

    def _published(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(getattr(torch, self.config.dtype))

    @abstractmethod
    def _optimizer_groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups, whose ``lr`` is set before every train step."""

    @property
    @abstractmethod
    def _part(self) -> tuple[int, int]:
        """Which share of the rows is this rank's, and of how many."""

    @property
    def _speaks(self) -> bool:
        """Whether this rank's values count, where several hold the same."""
        return True

    @abstractmethod
    def _forward(self, micros: list[MicroBatch], allowed: Tensor | None, reference: bool) -> list[Tensor | None]:
        """Log-probabilities of each micro-batch's tokens without gradient; None where another rank has them."""

    @abstractmethod
    def _update(self, micros: list[MicroBatch], allowed: Tensor | None, update: Update) -> float:
        """One optimizer update; returns the norm of the gradient before it was clipped."""

    def _share(self, batch: TrainBatch, rows: Rows) -> list[MicroBatch]:
        return share(batch, rows, self.config.micro_tokens, *self._part)

    def _tokens(self, batch: TrainBatch) -> Tokens:
        needed = self.config.objective
        return Tokens(
            mask=torch.from_numpy(batch.loss_mask),
            behaviour=torch.from_numpy(batch.behaviour_logprobs),
            advantages=torch.from_numpy(batch.advantages),
            proximal=self.score(batch) if needed.needs_proximal else None,
            reference=self.score(batch, reference=True) if needed.needs_reference else None,
        )

    def _allowed(self, batch: TrainBatch) -> Tensor | None:
        """[sets, vocabulary]: which tokens each allowed set holds; None when all hold all."""
        if not any(batch.allowed_sets):
            return None
        table = torch.zeros(len(batch.allowed_sets), self.folder.shape.vocab_size, dtype=torch.bool)
        for row, ids in zip(table, batch.allowed_sets, strict=True):
            row[list(ids) if ids else slice(None)] = True
        return table.to(self.device)

    def _summed(self, values: Tensor) -> Tensor:
        """The sum over the ranks that speak, on all of them."""
        if self.world == 1:
            return values
        if not self._speaks:
            values = torch.zeros_like(values)
        values = values.to(self.device)
        dist.all_reduce(values)
        return values.cpu()

    def _merged(self, updates: list[Metrics]) -> list[Metrics]:
        """Each update's metrics over the ranks that speak: sums, or maxima of names that end in ``_max``."""
        if self.world == 1:
            return updates
        gathered: list[list[Metrics] | None] = [None] * self.world
        dist.all_gather_object(gathered, updates if self._speaks else None)
        speaking = [ranks for ranks in gathered if ranks is not None]
        return [
            {name: (max if name.endswith("_max") else sum)([part[name] for part in parts]) for name in parts[0]}
            for parts in zip(*speaking, strict=True)
        ]


def _pick(tokens: Tokens, place: tuple[Tensor, Tensor], device: torch.device) -> Tokens:
    return Tokens(
        mask=tokens.mask[place].to(device),
        behaviour=tokens.behaviour[place].to(device),
        advantages=tokens.advantages[place].to(device),
        proximal=None if tokens.proximal is None else tokens.proximal[place].to(device),
        reference=None if tokens.reference is None else tokens.reference[place].to(device),
    )


def _as_batch(
    prompts: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]], allowed: tuple[int, ...]
) -> TrainBatch:
    """A batch that is only scored."""
    lengths = np.array([len(prompt) + len(generated) for prompt, generated in zip(prompts, tokens, strict=True)])
    count = len(lengths)
    ids = np.zeros((count, lengths.max()), dtype=np.int64)
    mask = np.zeros(ids.shape, dtype=np.bool_)
    for row, (prompt, generated) in enumerate(zip(prompts, tokens, strict=True)):
        ids[row, : lengths[row]] = [*prompt, *generated]
        mask[row, len(prompt) : lengths[row]] = True
    empty = np.zeros(ids.shape, dtype=np.float32)
    return TrainBatch(
        input_ids=ids,
        loss_mask=mask,
        behaviour_logprobs=empty,
        advantages=empty,
        versions=np.zeros(ids.shape, dtype=np.int32),
        lengths=lengths,
        trajectory=np.arange(count),
        group=np.arange(count),
        rewards=np.zeros(count, dtype=np.float32),
        allowed=np.zeros(count, dtype=np.int64),
        allowed_sets=(allowed,),
    )
