"""A trainer on torch: Hugging Face model, AdamW, FSDP2 when there are several processes.

Invariants
- A train step is a function of (weights, optimizer state, batch, step): its shuffling is drawn from (seed, step),
  so a restored trainer goes on exactly (``test_restored_trainer_goes_on_exactly``).
- Several processes compute what one does (``test_two_processes_equal_one``): every process gets the whole batch,
  takes its share of rows, and weights each token by its share of the *whole* minibatch.
- `version` counts completed train steps, and a step that is skipped or repeated is refused
  (``test_steps_come_in_order``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from rollart.algorithms import Tokens, aggregation_weights, keep_mask, objective
from rollart.trainers.batch import TrainBatch
from rollart.trainers.config import TrainerConfig
from rollart.trainers.micro_batch import MicroBatch, micro_batches, score
from rollart.trainers.state import TrainerState, read_state, restore_state


class TorchTrainer:
    """Trains the model of a Hugging Face folder; the process group, if any, must be initialized before."""

    def __init__(self, model_dir: str | Path, config: TrainerConfig = TrainerConfig()) -> None:  # noqa: B008
        self.config = config
        self.version = 0
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.model = self._load(model_dir)
        self._reference = self._load(model_dir) if config.objective.kl_coef else None
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
        )

    def train_step(self, batch: TrainBatch, step: int) -> dict[str, float]:
        """One train step of `config.minibatches` updates on `batch`; `step` must be the current version."""
        if step != self.version:
            raise ValueError(f"step is {step}; the next train step of this trainer is {self.version}")
        rate = self.config.learning_rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        tokens = self._tokens(batch)
        table = self._allowed_table(batch)
        parts = self._minibatches(batch, step)
        updates = [self._update(batch, tokens, table, rows) for rows in parts]
        self.version += 1
        metrics = {
            name: float(np.max(values) if name.endswith("_max") else np.mean(values))
            for name, values in ((name, [update[name] for update in updates]) for name in updates[0])
        }
        return {**metrics, "lr": rate, "tokens": float(batch.trained_tokens), "updates": float(len(updates))}

    def logprobs(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
        allowed: Sequence[int] | None = None,
    ) -> list[list[float]]:
        """The model's log-probabilities of `tokens` after `prompts`, after the mask to `allowed`."""
        width = max(len(p) + len(t) for p, t in zip(prompts, tokens, strict=True))
        ids = np.zeros((len(prompts), width), dtype=np.int64)
        mask = np.zeros_like(ids, dtype=np.bool_)
        for row, (prompt, generated) in enumerate(zip(prompts, tokens, strict=True)):
            end = len(prompt) + len(generated)
            ids[row, :end] = [*prompt, *generated]
            mask[row, len(prompt) : end] = True
        empty = np.zeros(ids.shape, dtype=np.float32)
        count = len(prompts)
        batch = TrainBatch(
            input_ids=ids,
            loss_mask=mask,
            behaviour_logprobs=empty,
            advantages=empty,
            versions=np.zeros(ids.shape, dtype=np.int32),
            lengths=np.array([len(p) + len(t) for p, t in zip(prompts, tokens, strict=True)]),
            trajectory=np.arange(count),
            group=np.arange(count),
            rewards=np.zeros(count, dtype=np.float32),
            allowed=np.zeros(count, dtype=np.int64),
            allowed_sets=(tuple(allowed or ()),),
        )
        scored = self._score_all(self.model, batch).numpy()
        return [row[columns].tolist() for row, columns in zip(scored, mask, strict=True)]

    def named_tensors(self) -> dict[str, Tensor]:
        """The weights by Hugging Face name, whole. They alias the live ones: copy or publish before the next step."""
        return {name: _whole(tensor) for name, tensor in self.model.state_dict().items()}

    def state_dict(self) -> TrainerState:
        return read_state(self.model, self.optimizer, self.version)

    def load_state_dict(self, state: TrainerState) -> None:
        self.version = restore_state(self.model, self.optimizer, state)

    def _load(self, folder: str | Path) -> nn.Module:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, local_files_only=True)
        if self.world > 1:
            from torch.distributed.fsdp import fully_shard

            for layer in model.model.layers:
                fully_shard(layer)
            fully_shard(model)
        return model

    def _minibatches(self, batch: TrainBatch, step: int) -> list[NDArray[np.int64]]:
        """Rows of each update: whole trajectories, shuffled."""
        rows = batch.trained_rows
        owners = np.unique(batch.trajectory[rows])
        np.random.default_rng((self.config.seed, step)).shuffle(owners)
        parts = np.array_split(owners, min(self.config.minibatches, len(owners)))
        return [rows[np.isin(batch.trajectory[rows], part)] for part in parts]

    def _tokens(self, batch: TrainBatch) -> Tokens:
        needed = self.config.objective.needs_proximal
        return Tokens(
            mask=torch.from_numpy(batch.loss_mask),
            behaviour=torch.from_numpy(batch.behaviour_logprobs),
            advantages=torch.from_numpy(batch.advantages),
            proximal=self._score_all(self.model, batch) if needed else None,
            reference=self._score_all(self._reference, batch) if self._reference is not None else None,
        )

    def _allowed_table(self, batch: TrainBatch) -> Tensor:
        """[sets, vocabulary]: which tokens each allowed set holds."""
        table = torch.zeros(len(batch.allowed_sets), self.model.config.vocab_size, dtype=torch.bool)
        for row, ids in zip(table, batch.allowed_sets, strict=True):
            row[list(ids) if ids else slice(None)] = True
        return table[torch.from_numpy(batch.allowed)]

    @torch.no_grad()
    def _score_all(self, model: nn.Module, batch: TrainBatch) -> Tensor:
        """Log-probabilities of every trained token, [rows, tokens]. Every process scores all rows."""
        result = torch.zeros(batch.input_ids.shape)
        allowed = self._allowed_table(batch)
        for micro in micro_batches(batch, batch.trained_rows, self.config.micro_tokens):
            values, _ = score(model, micro, allowed[torch.from_numpy(micro.rows)], self.config.temperature)
            result[np.ix_(micro.rows, micro.columns)] = values
        return torch.where(torch.from_numpy(batch.loss_mask), result, 0.0)

    def _update(
        self, batch: TrainBatch, tokens: Tokens, allowed: Tensor, rows: NDArray[np.int64]
    ) -> dict[str, float]:
        """One optimizer update on `rows`."""
        config = self.config
        index = torch.from_numpy(rows)
        weights = torch.zeros(batch.input_ids.shape)
        weights[index] = aggregation_weights(
            config.objective.aggregation,
            keep_mask(config.objective, tokens)[index],
            torch.from_numpy(batch.trajectory[rows]),
        )
        sums: dict[str, Tensor] = {}
        self.optimizer.zero_grad(set_to_none=True)
        for micro, counts in self._own_share(batch, rows):
            picked = np.ix_(micro.rows, micro.columns)
            mine = torch.from_numpy(micro.rows)
            logprobs, entropy = score(self.model, micro, allowed[mine], config.temperature)
            total, metrics = objective(
                config.objective, logprobs, entropy, _pick(tokens, picked), weights[picked] * counts
            )
            # FSDP averages gradients over processes, while the weights already are shares of the whole minibatch.
            (total * self.world).backward()
            _accumulate(sums, metrics)
        norm = _whole(nn.utils.clip_grad_norm_(self.model.parameters(), config.grad_clip))
        self.optimizer.step()
        if self.world > 1:
            for name, value in sums.items():
                dist.all_reduce(value, dist.ReduceOp.MAX if name.endswith("_max") else dist.ReduceOp.SUM)
        return {**{name: float(value) for name, value in sums.items()}, "grad_norm": float(norm)}

    def _own_share(self, batch: TrainBatch, rows: NDArray[np.int64]) -> list[tuple[MicroBatch, bool]]:
        """This process's micro-batches, and whether each counts.

        A forward pass is collective, so all make equally many; who has fewer repeats another's for nothing.
        """
        shares = [
            list(micro_batches(batch, rows[rank :: self.world], self.config.micro_tokens))
            for rank in range(self.world)
        ]
        mine, longest = shares[self.rank], max(map(len, shares))
        return [(micro, True) for micro in mine] + [(shares[0][0], False)] * (longest - len(mine))


def _pick(tokens: Tokens, index: tuple[NDArray[np.int64], ...]) -> Tokens:
    return Tokens(
        mask=tokens.mask[index],
        behaviour=tokens.behaviour[index],
        advantages=tokens.advantages[index],
        proximal=None if tokens.proximal is None else tokens.proximal[index],
        reference=None if tokens.reference is None else tokens.reference[index],
    )


def _accumulate(sums: dict[str, Tensor], metrics: dict[str, Tensor]) -> None:
    for name, value in metrics.items():
        before = sums.get(name, torch.zeros(()))
        sums[name] = torch.maximum(before, value) if name.endswith("_max") else before + value


def _whole(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered; any other as it is."""
    full = getattr(tensor, "full_tensor", None)
    return (full() if full is not None else tensor).detach()
