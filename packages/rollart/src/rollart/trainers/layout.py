"""What a trainer's layout asks of the model, the batch and the machine: checked before anything starts.

Each refusal names the key, its value, the reason and a value that works
(``tests/rollart/test_rollart_trainer_layout.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

from rollart.errors import ConfigError
from rollart.trainers.config import TrainerConfig
from rollart.trainers.model_folder import ModelShape

_MEGATRON_MODELS = ("qwen3", "llama")


def check_layout(
    config: TrainerConfig, shape: ModelShape, *, trajectories: int, gpus: int | None = None, prefix: str = "train."
) -> None:
    """Raise ConfigError for the first thing that cannot work.

    `trajectories` is the size of a batch, `gpus` how many this machine has (None looks). Keys begin with `prefix`.
    """
    if config.backend == "torch":
        _only_data_parallel(config, prefix)
    else:
        _megatron(config, shape, prefix)
    _divides(prefix + "data_parallel", config.data_parallel, trajectories, "trajectories of a batch")
    if config.device == "cuda":
        _gpus(config, gpu_count() if gpus is None else gpus, prefix)


def _only_data_parallel(config: TrainerConfig, prefix: str) -> None:
    for name in ("tensor_parallel", "pipeline_parallel"):
        degree = getattr(config, name)
        if degree > 1:
            reason = (
                f"the torch backend shards over data_parallel processes only; set {prefix}backend to megatron, or "
                f"{prefix}{name} to 1 and {prefix}data_parallel to {config.processes}"
            )
            raise ConfigError(prefix + name, degree, reason)


def _megatron(config: TrainerConfig, shape: ModelShape, prefix: str) -> None:
    if find_spec("megatron") is None:
        reason = "Megatron-Core is not installed: pip install 'rollart[megatron]', or set it to torch"
        raise ConfigError(prefix + "backend", config.backend, reason)
    if shape.model_type not in _MEGATRON_MODELS:
        reason = f"the model is a {shape.model_type}, it takes {' and '.join(_MEGATRON_MODELS)}; torch works"
        raise ConfigError(prefix + "backend", config.backend, reason)
    tensor = config.tensor_parallel
    for count, what in (
        (shape.num_attention_heads, "attention heads"),
        (shape.num_key_value_heads, "key-value heads"),
        (shape.vocab_size, "tokens of the vocabulary"),
        (shape.intermediate_size, "columns of the feed-forward layers"),
    ):
        _divides(prefix + "tensor_parallel", tensor, count, what, also=lambda degree: _fits(degree, shape))
    _divides(prefix + "pipeline_parallel", config.pipeline_parallel, shape.num_hidden_layers, "layers")


def _fits(degree: int, shape: ModelShape) -> bool:
    counts = (shape.num_attention_heads, shape.num_key_value_heads, shape.vocab_size, shape.intermediate_size)
    return all(count % degree == 0 for count in counts)


def _divides(
    key: str, degree: int, count: int, what: str, *, also: Callable[[int], bool] = lambda degree: True
) -> None:
    if count % degree == 0:
        return
    works = [other for other in range(1, min(degree, count) + 1) if count % other == 0 and also(other)]
    raise ConfigError(key, degree, f"does not divide the {count} {what}; {works[-1]} works")


def _gpus(config: TrainerConfig, gpus: int, prefix: str) -> None:
    if not gpus:
        raise ConfigError(prefix + "device", "cuda", "this machine has no GPU that torch can use; cpu works")
    if config.processes > gpus:
        reason = (
            f"the layout has {config.processes} processes (data x tensor x pipeline parallel) and this machine "
            f"{gpus} GPUs; lower {prefix}data_parallel"
        )
        raise ConfigError(prefix + "data_parallel", config.data_parallel, reason)


def gpu_count() -> int:
    """GPUs of this machine that torch can use."""
    import torch

    return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0
