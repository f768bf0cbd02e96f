"""Whether the model fits what the configuration gives it: its own context, the engines' caches, the weight store.

Each refusal names the key, its value, the reason and a value that works (tests/rollart/test_rollart_config.py).
"""

from __future__ import annotations

from math import ceil
from pathlib import Path
from typing import Any

import msgspec

from rollart.config.schema import Config
from rollart.errors import ConfigError
from rollart.models.tiny import TinyQwen3

_MIB = 1 << 20
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Engines keep caches in blocks of so many tokens, one of which they never use.
_BLOCK = 32


def check_fits(config: Config) -> None:
    """Raise ConfigError for the first thing that is too small for the model."""
    facts = _facts(config)
    _check_context(config, facts)
    _check_cache(config, facts)
    _check_store(config, facts)


def _facts(config: Config) -> dict[str, Any]:
    """The content of config.json; of a tiny model only what is asked for here."""
    if config.model.path:
        return msgspec.json.decode((Path(config.model.path) / "config.json").read_bytes(), type=dict[str, Any])
    tiny = TinyQwen3(seed=0, hidden=config.model.hidden, layers=config.model.layers, heads=config.model.heads)
    if tiny.heads % tiny.kv_heads:
        works = max(tiny.kv_heads, tiny.heads // tiny.kv_heads * tiny.kv_heads)
        reason = f"the tiny model has {tiny.kv_heads} key-value heads, of which it must be a multiple; {works} works"
        raise ConfigError("model.heads", tiny.heads, reason)
    return {
        "num_hidden_layers": tiny.layers,
        "num_key_value_heads": tiny.kv_heads,
        "num_attention_heads": tiny.heads,
        "head_dim": tiny.head_dim,
    }


def _check_context(config: Config, facts: dict[str, Any]) -> None:
    asked, most = config.generation.max_model_len, facts.get("max_position_embeddings")
    if most is not None and asked > most:
        raise ConfigError("generation.max_model_len", asked, f"the model takes {most} tokens at most; {most} works")


def _check_cache(config: Config, facts: dict[str, Any]) -> None:
    heads = facts.get("num_key_value_heads") or facts["num_attention_heads"]
    dim = facts.get("head_dim") or facts["hidden_size"] // facts["num_attention_heads"]
    token = 2 * facts["num_hidden_layers"] * heads * dim * _BYTES[config.train.dtype]
    tokens = _BLOCK * (ceil(config.generation.max_model_len / _BLOCK) + 1)
    need = ceil(token * tokens / _MIB)
    if need > config.generation.kv_cache_mb:
        length = config.generation.max_model_len
        reason = (
            f"one generation of generation.max_model_len = {length} tokens takes {need} MiB; {need} works, "
            "more lets as many more run at once"
        )
        raise ConfigError("generation.kv_cache_mb", config.generation.kv_cache_mb, reason)


def _check_store(config: Config, facts: dict[str, Any]) -> None:
    """Of a model folder; a tiny model fits anywhere."""
    if not config.model.path or config.weights.store == "shm":
        return
    stored = sum(file.stat().st_size for file in Path(config.model.path).glob("*.safetensors"))
    held = _BYTES.get(facts.get("dtype") or facts.get("torch_dtype") or "float32", 4)
    versions = config.weights.keep_versions + 1
    need = ceil(stored * _BYTES[config.train.dtype] / held * versions / _MIB)
    if need > config.weights.segment_mb:
        reason = (
            f"the store holds {versions} versions of the model at once, {need} MiB; set it to {need} or more, "
            "or weights.store to shm"
        )
        raise ConfigError("weights.segment_mb", config.weights.segment_mb, reason)
