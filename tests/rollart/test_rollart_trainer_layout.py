"""Layouts that cannot work are refused before anything starts: key, value, reason, and a value that works."""

from __future__ import annotations

import pytest

from rollart.errors import ConfigError
from rollart.models import make_tiny_qwen3
from rollart.trainers import ModelFolder, ModelShape, TrainerConfig, check_layout

SHAPE = ModelShape(
    model_type="qwen3",
    vocab_size=48,
    hidden_size=64,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=4,
    intermediate_size=256,
)


@pytest.mark.parametrize(
    "config",
    [
        TrainerConfig(),
        TrainerConfig(data_parallel=4),
        TrainerConfig(backend="megatron", tensor_parallel=4, pipeline_parallel=3, data_parallel=2),
        TrainerConfig(device="cuda", data_parallel=8),
    ],
)
def test_layouts_that_work(config):
    check_layout(config, SHAPE, trajectories=16, gpus=8)


@pytest.mark.parametrize(
    ("given", "shape", "message"),
    [
        (
            {"backend": "megatron", "tensor_parallel": 3},
            {},
            r"train.tensor_parallel = 3: does not divide the 8 attention heads; 2 works",
        ),
        ({"backend": "megatron", "tensor_parallel": 8}, {}, "4 key-value heads; 4 works"),
        ({"backend": "megatron", "tensor_parallel": 4}, {"vocab_size": 50}, "50 tokens of the vocabulary; 2 works"),
        ({"backend": "megatron", "tensor_parallel": 4}, {"intermediate_size": 130}, "130 columns.*; 2 works"),
        (
            {"backend": "megatron", "pipeline_parallel": 4},
            {},
            r"train.pipeline_parallel = 4: does not divide the 6 layers; 3 works",
        ),
        ({"data_parallel": 5}, {}, r"train.data_parallel = 5: does not divide the 16 trajectories.*; 4 works"),
        ({"tensor_parallel": 2}, {}, "set train.backend to megatron, or train.tensor_parallel to 1"),
        ({"pipeline_parallel": 2}, {}, "train.data_parallel to 2"),
        ({"device": "cuda"}, {}, r"train.device = 'cuda': this machine has no GPU.*; cpu works"),
        ({"backend": "megatron"}, {"model_type": "gpt2"}, "the model is a gpt2.*torch works"),
    ],
)
def test_refused_layouts(given, shape, message):
    import msgspec

    with pytest.raises(ConfigError, match=message):
        check_layout(TrainerConfig(**given), msgspec.structs.replace(SHAPE, **shape), trajectories=16, gpus=0)


def test_too_few_gpus():
    with pytest.raises(ConfigError, match=r"8 processes .* and this machine 4 GPUs; lower train.data_parallel"):
        check_layout(TrainerConfig(device="cuda", data_parallel=8), SHAPE, trajectories=16, gpus=4)


@pytest.mark.parametrize(("pattern", "what"), [("config.json", "a model"), ("tokenizer*", "a tokenizer")])
def test_folders_without_their_parts(tmp_path, pattern, what):
    folder = make_tiny_qwen3(tmp_path / "m", 0)
    for file in folder.glob(pattern):
        file.unlink()
    with pytest.raises(ConfigError, match=f"model.path = .*name a Hugging Face folder with {what}"):
        ModelFolder.read(folder)


def test_a_config_of_something_else(tmp_path):
    folder = make_tiny_qwen3(tmp_path / "m", 0)
    (folder / "config.json").write_text('{"model_type": "clip"}')
    with pytest.raises(ConfigError, match=r"config\.json lacks .*num_key_value_heads"):
        ModelFolder.read(folder)
