"""The trainer on torch: a Hugging Face model, AdamW, FSDP2 when there are several processes.

Parameters and optimizer states are float32. With ``dtype: bfloat16`` the model computes in bfloat16 (FSDP2's mixed
precision, or autocast in a single process), and gradients are reduced in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rollart.errors import ConfigError
from rollart.trainers.config import TrainerConfig
from rollart.trainers.micro_batch import MicroBatch
from rollart.trainers.state import TrainerState, read_state, restore_state
from rollart.trainers.trainer import Trainer, Update
from rollart.trainers.vocabulary import token_logprobs
from weightsync import Shard


class TorchTrainer(Trainer):
    """Trains the model of a Hugging Face folder; the process group, if any, must be initialized before."""

    def __init__(self, model_dir: str | Path, config: TrainerConfig = TrainerConfig()) -> None:  # noqa: B008
        super().__init__(model_dir, config)
        self._policy = self._load(model_dir)
        self._reference = self._load(model_dir) if config.objective.needs_reference else None
        self.model = self._policy.model
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
        )

    def shards(self) -> tuple[dict[str, Tensor], dict[str, Shard]]:
        tensors: dict[str, Tensor] = {}
        shards: dict[str, Shard] = {}
        for name, tensor in self.model.state_dict().items():
            tensors[name] = self._published(tensor.to_local() if self.world > 1 else tensor)
            if self.world > 1:
                size = tensor.shape[0]
                start = min(self.rank * -(-size // self.world), size)
                shards[name] = Shard(0, start, size)
        return tensors, shards

    def state_dict(self) -> TrainerState:
        return read_state(self.model, self.optimizer, self.version)

    def load_state_dict(self, state: TrainerState) -> None:
        self.version = restore_state(self.model, self.optimizer, state)

    def save(self, folder: str | Path) -> None:
        state = self.state_dict()
        if self.rank == 0:
            state.save(folder)
        if self.world > 1:
            dist.barrier()

    def restore(self, folder: str | Path) -> None:
        self.load_state_dict(TrainerState.load(folder))

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.model.state_dict().items():
            yield name, _whole(tensor)

    @property
    def _part(self) -> tuple[int, int]:
        return self.rank, self.world

    def _optimizer_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @torch.no_grad()
    def _forward(self, micros: list[MicroBatch], allowed: Tensor | None, reference: bool) -> list[Tensor | None]:
        scorer = self._reference if reference else self._policy
        assert scorer is not None, "loaded when the loss needs it"
        return [scorer(micro.to(self.device), allowed)[0] for micro in micros]

    def _update(self, micros: list[MicroBatch], allowed: Tensor | None, update: Update) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        for micro in micros:
            logprobs, entropy = self._policy(micro.to(self.device), allowed)
            # FSDP averages gradients over processes, while the weights already are shares of the whole minibatch.
            (update.loss(micro, logprobs, entropy) * self.world).backward()
        norm = _whole(nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip))
        self.optimizer.step()
        return float(norm)

    def _load(self, folder: str | Path) -> _Scorer:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, local_files_only=True)
        _check_output_layer(model, str(folder))
        if self.config.checkpoint_activations:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()  # transformers checkpoints in training mode only; these models have no dropout
        scorer = _Scorer(model.to(self.device), self.config, autocast=self.world == 1)
        if self.world > 1:
            _shard(scorer, self.config)
        return scorer


# What some families do to logits after the output layer, which is applied here without it.
_AFTER_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


def _check_output_layer(model: Any, folder: str) -> None:
    """Raise ConfigError for a model whose logits are not the last hidden state times a matrix."""
    changed = [name for name in _AFTER_LOGITS if getattr(model.config, name, None) not in (None, 1.0)]
    head = getattr(model, "lm_head", None)
    if changed or head is None or getattr(head, "bias", None) is not None or not hasattr(model, "model"):
        what = f"{changed[0]} is set" if changed else "its output layer is not a matrix named lm_head"
        raise ConfigError("model.path", folder, f"{what}, which the trainer does not compute; Qwen3 and Llama work")


class _Scorer(nn.Module):
    """A model that gives log-probabilities: the output layer is applied here, to the tokens that train alone."""

    def __init__(self, model: Any, config: TrainerConfig, *, autocast: bool) -> None:
        super().__init__()
        self.model = model
        self._dtype = getattr(torch, config.dtype)
        self._autocast = autocast and config.dtype != "float32"
        self._temperature = config.temperature
        self._logits_bytes = config.logits_mb << 20

    def forward(self, micro: MicroBatch, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the micro-batch's tokens and entropies, [tokens]."""
        device = micro.contexts.device.type
        with torch.autocast(device, self._dtype, enabled=self._autocast):
            hidden = self.model.model(input_ids=micro.contexts, use_cache=False).last_hidden_state
        return token_logprobs(
            hidden[micro.context, micro.position].to(self._dtype),
            self.model.lm_head.weight.to(self._dtype),
            micro.targets,
            allowed=allowed,
            sets=micro.sets,
            temperature=self._temperature,
            logits_bytes=self._logits_bytes,
        )


def _shard(scorer: _Scorer, config: TrainerConfig) -> None:
    """FSDP2: each layer is a unit of its own, the embeddings and the output layer belong to the root."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {"mesh": init_device_mesh(config.device, (dist.get_world_size(),))}
    if config.dtype != "float32":
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=getattr(torch, config.dtype), reduce_dtype=torch.float32
        )
    for layer in scorer.model.model.layers:
        fully_shard(layer, **options)
    # The root's parameters stay whole between forward and backward pass: the output layer's are used after it.
    fully_shard(scorer, reshard_after_forward=False, **options)


def _whole(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered; any other as it is."""
    full = getattr(tensor, "full_tensor", None)
    return (full() if full is not None else tensor).detach()
