"""A tiny Qwen3 model with a tokenizer, made on the spot.

Invariants
- The same arguments give the same bytes, whatever was drawn from torch before
  (``test_model_is_a_function_of_its_seed``).
- A folder that already holds this model is left alone; one that holds another is an error, never overwritten
  (``test_making_twice_changes_nothing``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch

from rollart.models.vocabulary import CONTROL, VOCABULARIES, Vocabulary, write_tokenizer

_RECIPE = "tiny.json"


class TinyQwen3(msgspec.Struct, frozen=True, kw_only=True):
    """What a tiny model is made from; written beside its weights."""

    seed: int
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 32
    intermediate: int = 256
    max_length: int = 1024
    rope_theta: float = 10_000.0
    init_std: float = 0.02
    vocabulary: Vocabulary = "symbols"


def make_tiny_qwen3(folder: str | Path, seed: int, **shape: Any) -> Path:
    """Writes a randomly initialized Qwen3 model and its tokenizer to `folder`, and returns the folder.

    `shape` holds fields of `TinyQwen3` other than the seed.
    """
    recipe = TinyQwen3(seed=seed, **shape)
    folder = Path(folder)
    marker = folder / _RECIPE
    if marker.exists():
        found = msgspec.json.decode(marker.read_bytes(), type=TinyQwen3)
        if found != recipe:
            raise ValueError(f"folder {folder} holds a model made from {found}; give another folder or remove it")
        return folder
    write_tokenizer(folder, recipe.vocabulary)
    _write_model(folder, recipe)
    marker.write_bytes(msgspec.json.encode(recipe))  # last: a folder without it is unfinished and is made again
    return folder


def _write_model(folder: Path, recipe: TinyQwen3) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    words = VOCABULARIES[recipe.vocabulary]
    pad, eos = CONTROL[recipe.vocabulary]
    config = Qwen3Config(
        vocab_size=len(words),
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=recipe.max_length,
        initializer_range=recipe.init_std,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
        pad_token_id=words.index(pad),
        eos_token_id=words.index(eos),
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = Qwen3ForCausalLM(config).float()
    disable_progress_bar()  # there is nothing to wait for
    model.save_pretrained(folder, safe_serialization=True)
