"""What several test files of the trainer are given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rollart.models import make_tiny_qwen3


@pytest.fixture
def make_llama(tmp_path: Path) -> Callable[..., Path]:
    """Makes a tiny Llama folder, with the tokenizer of the tiny Qwen3."""

    def make(*, tied: bool = False, dtype: torch.dtype = torch.float32, max_shard_size: str = "5GB") -> Path:
        from transformers import LlamaConfig, LlamaForCausalLM

        folder = make_tiny_qwen3(tmp_path / "llama", 1)
        for file in folder.glob("*.safetensors"):
            file.unlink()
        config = LlamaConfig(
            vocab_size=16,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            tie_word_embeddings=tied,
            max_position_embeddings=256,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            model = LlamaForCausalLM(config).to(dtype)
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        return folder

    return make
