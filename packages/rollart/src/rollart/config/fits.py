"""Whether the model fits what the configuration gives it: its own context, the engines' caches, the weight store.

Each refusal names the key, its value, the reason and a value that works (tests/rollart/test_rollart_config.py).
"""

from __future__ import annotations

from math import ceil
from pathlib import Path

from rollart.config.schema import Config
from rollart.errors import ConfigError
from rollart.trainers.model_folder import ModelShape

_MIB = 1 << 20
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Engines keep caches in blocks of so many tokens, one of which they never use.
_BLOCK = 32


def check_fits(config: Config, shape: ModelShape) -> None:
    """Raise ConfigError for the first thing that is too small for the model."""
    _check_context(config, shape)
    _check_cache(config, shape)
    _check_store(config, shape)


def _check_context(config: Config, shape: ModelShape) -> None:
    asked, most = config.generation.max_model_len, shape.max_position_embeddings
    if most is not None and asked > most:
        raise ConfigError("generation.max_model_len", asked, f"the model takes {most} tokens at most; {most} works")


def _check_cache(config: Config, shape: ModelShape) -> None:
    heads = shape.num_key_value_heads * shape.head_size
    token = 2 * shape.num_hidden_layers * heads * _BYTES[config.train.dtype]
    tokens = _BLOCK * (ceil(config.generation.max_model_len / _BLOCK) + 1)
    need = ceil(token * tokens / _MIB)
    if need > config.generation.kv_cache_mb:
        length = config.generation.max_model_len
        reason = (
            f"one generation of generation.max_model_len = {length} tokens takes {need} MiB; {need} works, "
            "more lets as many more run at once"
        )
        raise ConfigError("generation.kv_cache_mb", config.generation.kv_cache_mb, reason)


def _check_store(config: Config, shape: ModelShape) -> None:
    """Of a model folder; a tiny model fits anywhere."""
    if not config.model.path or config.weights.store == "shm":
        return
    stored = sum(file.stat().st_size for file in Path(config.model.path).glob("*.safetensors"))
    held = _BYTES.get(shape.dtype or shape.torch_dtype or "float32", 4)
    versions = config.weights.keep_versions + 1
    need = ceil(stored * _BYTES[config.train.dtype] / held * versions / _MIB)
    if need > config.weights.segment_mb:
        reason = (
            f"the store holds {versions} versions of the model at once, {need} MiB; set it to {need} or more, "
            "or weights.store to shm"
        )
        raise ConfigError("weights.segment_mb", config.weights.segment_mb, reason)
