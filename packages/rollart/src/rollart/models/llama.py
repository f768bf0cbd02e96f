"""A tiny Llama with grouped-query attention, made on the spot: the other family that the trainers take."""

from __future__ import annotations

from pathlib import Path

import torch

from rollart.models.vocabulary import CONTROL, SYMBOLS, write_tokenizer


def make_tiny_llama(
    folder: str | Path, seed: int, *, tied: bool = False, dtype: str = "float32", max_shard_size: str = "5GB"
) -> Path:
    """Writes a randomly initialized Llama and its tokenizer to `folder`, and returns the folder.

    `tied` shares the embeddings with the output layer; files are cut at `max_shard_size`, as transformers cuts them.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = Path(folder)
    write_tokenizer(folder, "symbols")
    pad, eos = CONTROL["symbols"]
    config = LlamaConfig(
        vocab_size=len(SYMBOLS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        pad_token_id=SYMBOLS.index(pad),
        eos_token_id=SYMBOLS.index(eos),
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder
