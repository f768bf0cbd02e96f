"""The trainer on Megatron-Core: tensor, pipeline and data parallelism, and the distributed optimizer.

Every rank is given the whole batch and takes its data-parallel share of rows; the last stage computes the loss, the
same on all its tensor-parallel ranks. Parameters are in the configured type, the optimizer's in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rollart.trainers.config import TrainerConfig
from rollart.trainers.megatron_names import Part, to_hf
from rollart.trainers.megatron_state import restore_rank, save_rank
from rollart.trainers.micro_batch import MicroBatch
from rollart.trainers.trainer import Trainer, Update
from rollart.trainers.vocabulary import token_logprobs
from weightsync import Shard


class MegatronTrainer(Trainer):
    """Trains this rank's share of a Hugging Face folder; the process group must be initialized before.

    A process has one at a time: Megatron keeps its groups in the process.
    """

    def __init__(self, model_dir: str | Path, config: TrainerConfig) -> None:
        super().__init__(model_dir, config)
        if self.world != config.processes or not dist.is_initialized():
            raise ValueError(f"the layout has {config.processes} processes, the process group {self.world}")
        if config.device == "cpu":
            import rollart.trainers.megatron_cpu  # noqa: F401
        from megatron.core import parallel_state, tensor_parallel

        from rollart.trainers.megatron_model import build

        self._parallel = parallel_state
        parallel_state.initialize_model_parallel(config.tensor_parallel, config.pipeline_parallel)
        tensor_parallel.model_parallel_cuda_manual_seed((config.seed or 0) + 1)
        self.module, self._place = build(self.folder, config, self.device)
        self._reference: Any = None
        if config.objective.needs_reference:
            self._reference, _ = build(self.folder, config, self.device)
        self._model, self.optimizer = _trained(self.module, config)

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        held = {part.name: part for part in self._parts()} if self._publishes else {}
        for name in self.folder.files:
            tied = self._place.tied and name == "lm_head.weight"
            yield name, self._gathered(name, held.get("model.embed_tokens.weight" if tied else name))

    def shards(self) -> tuple[dict[str, Tensor], dict[str, Shard]]:
        parts = [part for part in self._parts() if part.shard is not None or self._place.tensor_rank == 0]
        mine = list(_share_of(parts, *self._part))
        # What a stage alone has is a shard too: readers take whole tensors from the first rank only.
        return (
            {part.name: part.tensor for part in mine},
            {part.name: part.shard or Shard(0, 0, part.tensor.shape[0]) for part in mine},
        )

    def save(self, folder: str | Path) -> None:
        save_rank(folder, self.rank, self.config, self.version, self.module, self.optimizer)
        dist.barrier()

    def restore(self, folder: str | Path) -> None:
        self.version = restore_rank(folder, self.rank, self.config, self.module, self.optimizer)
        dist.barrier()

    def close(self) -> None:
        self._parallel.destroy_model_parallel()

    @property
    def _part(self) -> tuple[int, int]:
        return self._parallel.get_data_parallel_rank(), self._parallel.get_data_parallel_world_size()

    @property
    def _speaks(self) -> bool:
        return self._parallel.is_pipeline_last_stage() and self._place.tensor_rank == 0

    @property
    def _publishes(self) -> bool:
        return bool(self._parallel.get_data_parallel_rank() == 0)

    def _optimizer_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @torch.no_grad()
    def _forward(self, micros: list[MicroBatch], allowed: Tensor | None, reference: bool) -> list[Tensor | None]:
        def scored(micro: MicroBatch, output: Tensor, non_loss_data: bool) -> Tensor:
            return self._logprobs(self._reference if reference else self.module, micro, output, allowed)[0]

        results = self._run(self._reference if reference else self._model, micros, scored, forward_only=True)
        return results or [None] * len(micros)

    def _update(self, micros: list[MicroBatch], allowed: Tensor | None, update: Update) -> float:
        # Megatron takes means over micro-batches and data-parallel ranks; the weights are shares of the whole.
        scale = len(micros) * self._part[1]

        def loss(micro: MicroBatch, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            total = update.loss(micro, *self._logprobs(self.module, micro, output, allowed))
            return total * scale, {}

        self._model.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._run(self._model, micros, loss, forward_only=False)
        _, norm, _ = self.optimizer.step()
        return float(norm)

    def _run(self, model: Any, micros: list[MicroBatch], finish: Any, *, forward_only: bool) -> list[Tensor | None]:
        """All micro-batches through the pipeline; `finish` turns the last stage's outputs into what counts."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def step(waiting: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Any]:
            micro = next(waiting).to(self.device)
            positions = torch.arange(micro.contexts.shape[1], device=self.device).expand_as(micro.contexts)
            return model(micro.contexts, positions, None), partial(finish, micro)

        results: list[Tensor | None] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(micros),
            model=[model],
            num_microbatches=len(micros),
            seq_length=micros[0].contexts.shape[1],
            micro_batch_size=len(micros[0].contexts),
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return results

    def _logprobs(
        self, module: Any, micro: MicroBatch, output: Tensor, allowed: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """From the last stage's hidden states, [contexts, tokens, width], vocabulary-parallel."""
        from rollart.trainers.megatron_model import output_weight

        weight = output_weight(module)
        first = self._place.tensor_rank * weight.shape[0]
        return token_logprobs(
            output[micro.context, micro.position],
            weight,
            micro.targets,
            allowed=None if allowed is None else allowed[:, first : first + weight.shape[0]],
            sets=micro.sets,
            temperature=self.config.temperature,
            group=self._parallel.get_tensor_model_parallel_group() if self.config.tensor_parallel > 1 else None,
            first=first,
            logits_bytes=self.config.logits_mb << 20,
        )

    def _parts(self) -> list[Part]:
        return [
            part
            for name, parameter in self.module.named_parameters()
            for part in to_hf(name, parameter.detach(), self._place)
        ]

    def _gathered(self, name: str, part: Part | None) -> Tensor:
        """The whole tensor on every rank, each element from the one rank that holds it (the first, of several)."""
        whole = torch.zeros(self.folder.shape_of(name), dtype=getattr(torch, self.config.dtype), device=self.device)
        if part is not None and (part.shard is not None or self._place.tensor_rank == 0):
            shard = part.shard or Shard(0, 0, whole.shape[0])
            whole.narrow(shard.dim, shard.start, part.tensor.shape[shard.dim]).copy_(part.tensor)
        # As bytes, since a sum with zeros would turn -0.0 into 0.0.
        dist.all_reduce(whole.view(torch.uint8))
        return whole


def _share_of(parts: list[Part], rank: int, ranks: int) -> Iterator[Part]:
    """What one of several ranks that hold the same parts publishes: about as many bytes as each other one."""
    loads = [0] * ranks
    for part in sorted(parts, key=lambda part: part.tensor.nbytes, reverse=True):
        least = loads.index(min(loads))
        loads[least] += part.tensor.nbytes
        if least == rank:
            yield part


def _trained(module: Any, config: TrainerConfig) -> tuple[Any, Any]:
    """The model in Megatron's data parallelism, and its optimizer."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    model = DistributedDataParallel(
        config=module.config,
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=config.distributed_optimizer
        ),
        module=module,
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            clip_grad=config.grad_clip,
            bf16=config.dtype == "bfloat16",
            params_dtype=getattr(torch, config.dtype),
            use_distributed_optimizer=config.distributed_optimizer,
            log_num_zeros_in_grad=False,
        ),
        [model],
        config_overrides={},  # weight decay on all parameters, as the torch trainer has it
    )
    module.config.finalize_model_grads_func = finalize_model_grads
    module.config.no_sync_func = model.no_sync
    return model, optimizer
