"""Model folders: read and written again, everything is equal bit by bit."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollart.models import make_tiny_llama, make_tiny_qwen3
from rollart.trainers import ModelFolder, TorchTrainer, TrainerConfig


def bits(folder):
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors.update(load_file(file))
    return {name: (tensor.dtype, tensor.view(torch.uint8).numpy().tobytes()) for name, tensor in tensors.items()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", ["5GB", "20KB"])
def test_export_is_bit_exact(tmp_path, tied, dtype, size):
    source = make_tiny_llama(tmp_path / "source", 3, tied=tied, dtype=dtype, max_shard_size=size)
    trainer = TorchTrainer(source)
    trainer.export(tmp_path / "exported")
    assert bits(tmp_path / "exported") == bits(source)
    names = {file.name for file in source.iterdir()}
    assert {file.name for file in (tmp_path / "exported").iterdir()} == names
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert loaded.dtype == getattr(torch, dtype)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "exported")) == 16


def test_a_trained_export_scores_the_same(tmp_path):
    source = make_tiny_qwen3(tmp_path / "source", 0)
    trainer = TorchTrainer(source, TrainerConfig(lr=1e-2))
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(0.01)
    trainer.export(tmp_path / "exported")
    again = TorchTrainer(tmp_path / "exported")
    assert again.logprobs([[2, 3]], [[4, 5]]) == trainer.logprobs([[2, 3]], [[4, 5]])
    assert bits(tmp_path / "exported") != bits(source)


def test_other_tensors_are_refused(tmp_path):
    folder = ModelFolder.read(make_tiny_llama(tmp_path / "source", 3))
    tensors = dict(folder.tensors())
    with pytest.raises(ValueError, match="'extra' is not in"):
        folder.write(tmp_path / "a", iter([*tensors.items(), ("extra", torch.zeros(1))]))
    tensors.pop("model.norm.weight")
    with pytest.raises(ValueError, match=r"'model.norm.weight' of .* was not given"):
        folder.write(tmp_path / "b", iter(tensors.items()))
