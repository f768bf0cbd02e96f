"""The Megatron trainer beside the torch trainer: the same losses, weights and files, in every layout.

Megatron on a CPU replaces parts of torch for its whole process, so every layout runs in processes of its own.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rollart.algorithms import ObjectiveConfig
from rollart.errors import ConfigError
from rollart.models import make_tiny_qwen3
from rollart.trainers import ModelFolder, TorchTrainer, TrainBatch, TrainerConfig
from rollart.trainers.backend import join, open_trainer
from weightsync import FileStore, Publisher, ShardedSubscriber

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed: rollart[megatron]"),
]
ALLOWED = (9, 10, 11, 12)
STEPS = 20
PROMPTS, TOKENS = [[2, 3, 4], [5, 6, 7, 8, 3]], [[9, 12], [10]]
SETTINGS: dict[str, Any] = {
    "lr": 1e-3,
    "minibatches": 2,
    "micro_tokens": 60,
    "logits_mb": 1,
    "objective": ObjectiveConfig(loss="ppo", clip_high=0.28, entropy_coef=0.01),
}


def make_batch(seed: int, trajectories: int = 8, width: int = 12) -> TrainBatch:
    """Rows of several lengths; half of the tasks choose from a few tokens, half from all."""
    random = np.random.default_rng(seed)
    lengths = random.integers(5, width + 1, trajectories)
    columns = np.arange(width)
    ids = np.where(columns < lengths[:, None], random.integers(2, 9, (trajectories, width)), 0)
    mask = (columns < lengths[:, None]) & (columns >= lengths[:, None] - 3)
    ids[mask] = random.choice(ALLOWED, mask.sum())
    behaviour = np.log(0.2) + random.normal(0, 0.3, ids.shape)
    return TrainBatch(
        input_ids=ids,
        loss_mask=mask,
        behaviour_logprobs=np.where(mask, behaviour, 0).astype(np.float32),
        advantages=np.where(mask, random.normal(0, 1, (trajectories, 1)), 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        lengths=lengths,
        trajectory=np.arange(trajectories),
        group=np.arange(trajectories) // 4,
        rewards=np.zeros(trajectories, dtype=np.float32),
        allowed=np.arange(trajectories) % 2,
        allowed_sets=(ALLOWED, ()),
    )


class Result(msgspec.Struct):
    """What one layout's rank 0 says."""

    metrics: list[dict[str, float]]
    repeated: list[dict[str, float]]
    logprobs: list[list[float]]


def _rank(rank: int, config: TrainerConfig, model: Path, out: Path, steps: int, port: int) -> None:
    torch.set_num_threads(1)
    join(config, rank, f"127.0.0.1:{port}")
    trainer = open_trainer(model, config)
    trainer.export(out / "exported")
    metrics = []
    for step in range(steps):
        if step == steps // 2:
            (out / "state").mkdir(exist_ok=True)
            trainer.save(out / "state")
        metrics.append(trainer.train_step(make_batch(step), step))
    logprobs = trainer.logprobs(PROMPTS, TOKENS, ALLOWED)
    weights = {name: tensor.clone() for name, tensor in trainer.stream()}
    tensors, shards = trainer.shards()
    if tensors:
        asyncio.run(_publish(out / f"store-{rank}", tensors, shards))
    trainer.restore(out / "state")
    assert trainer.version == steps // 2
    repeated = [trainer.train_step(make_batch(step), step) for step in range(steps // 2, steps)]
    if rank == 0:
        save_file(weights, out / "weights.safetensors")
        (out / "result.json").write_bytes(msgspec.json.encode(Result(metrics, repeated, logprobs)))
    torch.distributed.destroy_process_group()


async def _publish(folder: Path, tensors: dict[str, torch.Tensor], shards: dict[str, Any]) -> None:
    store = FileStore(folder)
    await Publisher(store, bucket_bytes=4096).publish(1, tensors, shards)
    await store.close()


async def _pull(folders: list[Path]) -> dict[str, torch.Tensor]:
    stores = [FileStore(folder) for folder in folders]
    subscriber = ShardedSubscriber(stores, {})
    found: dict[str, torch.Tensor] = {}
    staged = await subscriber.prefetch(1, timeout=10)
    await subscriber.commit(staged, lambda name, tensor: found.update({name: tensor.torch().clone()}))
    await subscriber.close()
    for store in stores:
        await store.close()
    return found


def launch(config: TrainerConfig, model: Path, out: Path, steps: int = STEPS) -> Result:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    arguments = [(rank, config, model, out, steps, port) for rank in range(config.processes)]
    ranks = [context.Process(target=_rank, args=each) for each in arguments]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(400)
        assert process.exitcode == 0
    return msgspec.json.decode((out / "result.json").read_bytes(), type=Result)


def bits(folder: Path) -> dict[str, tuple[torch.dtype, bytes]]:
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return {name: (tensor.dtype, tensor.view(torch.uint8).numpy().tobytes()) for name, tensor in tensors.items()}


def compare(config: TrainerConfig, model: Path, out: Path, steps: int = STEPS, limit: float = 1e-4) -> None:
    """One layout against the torch trainer in this process, on the same batches."""
    result = launch(config, model, out, steps)
    assert bits(out / "exported") == bits(model), "what was loaded is exported bit by bit"
    alone = TorchTrainer(model, msgspec.structs.replace(config, backend="torch", **LAYOUT))
    for step, metrics in enumerate(result.metrics):
        expected = alone.train_step(make_batch(step), step)
        for name in ("loss", "policy_loss", "entropy", "behaviour_gap", "behaviour_kl", "ratio"):
            assert metrics[name] == pytest.approx(expected[name], abs=limit), (step, name)
        assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=100 * limit)
        assert {"bounded", "lr", "tokens", "updates"} <= metrics.keys() == expected.keys()
    assert result.repeated == result.metrics[steps // 2 :], "a restored trainer goes on exactly"
    for ours, theirs in zip(result.logprobs, alone.logprobs(PROMPTS, TOKENS, ALLOWED), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=10 * limit)
    weights = load_file(out / "weights.safetensors")
    assert set(weights) == set(ModelFolder.read(model).files)
    pulled = asyncio.run(_pull(sorted(out.glob("store-*"))))
    assert bits_of(pulled) == bits_of(weights), "the ranks' shards are the whole"


def bits_of(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: tensor.contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


LAYOUT: dict[str, Any] = {"data_parallel": 1, "tensor_parallel": 1, "pipeline_parallel": 1}


def megatron(**given: Any) -> TrainerConfig:
    return TrainerConfig(backend="megatron", **{**SETTINGS, **given})


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return make_tiny_qwen3(tmp_path_factory.mktemp("m") / "qwen3", 5, hidden=32, heads=4, kv_heads=2, layers=2)


def test_tensor_parallel_equals_torch(qwen3, tmp_path):
    compare(megatron(tensor_parallel=2), qwen3, tmp_path, steps=4)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"tensor_parallel": 2},
        {"pipeline_parallel": 2},
        {"data_parallel": 2},
        {"data_parallel": 2, "distributed_optimizer": False},
        {"tensor_parallel": 2, "pipeline_parallel": 2},
    ],
    ids=lambda layout: "-".join(f"{name}={value}" for name, value in layout.items()) or "one process",
)
def test_layouts_equal_torch(qwen3, tmp_path, layout):
    compare(megatron(**layout), qwen3, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "given",
    [
        {"objective": ObjectiveConfig(loss="grpo", kl_coef=0.1, aggregation="sequence_mean"), "tensor_parallel": 2},
        {"objective": ObjectiveConfig(loss="decoupled_ppo", outlier=3.0), "pipeline_parallel": 2},
        {"objective": ObjectiveConfig(loss="tis", mismatch_cap=5.0), "ppo_epochs": 2, "minibatch_of": "groups"},
        {"checkpoint_activations": True, "tensor_parallel": 2},
    ],
    ids=["grpo", "decoupled", "mismatch, epochs", "activations"],
)
def test_losses_equal_torch(qwen3, tmp_path, given):
    compare(megatron(**given), qwen3, tmp_path, steps=8)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}], ids=["tensor", "pipeline"])
def test_llama_equals_torch(make_llama, tmp_path, tied, layout):
    compare(megatron(**layout), make_llama(tied=tied), tmp_path, steps=8)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_bfloat16_is_near_torch(qwen3, tmp_path):
    config = megatron(dtype="bfloat16", data_parallel=2)
    result = launch(config, qwen3, tmp_path, steps=8)
    alone = TorchTrainer(qwen3, TrainerConfig(**SETTINGS))
    for step, metrics in enumerate(result.metrics):
        assert metrics["loss"] == pytest.approx(alone.train_step(make_batch(step), step)["loss"], abs=0.05)
    assert result.repeated == result.metrics[4:]
    assert {tensor.dtype for tensor in load_file(tmp_path / "weights.safetensors").values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("key", "value"),
    [("attention_bias", True), ("hidden_act", "gelu"), ("use_sliding_window", True), ("model_type", "qwen2")],
)
def test_models_it_would_compute_differently_are_refused(qwen3, tmp_path, key, value):
    from rollart.trainers.megatron_model import check_supported

    folder = ModelFolder.read(qwen3)
    folder.config[key] = value
    with pytest.raises(ConfigError, match=f"{key} = {value!r}.*torch works"):
        check_supported(folder)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: Megatron with Transformer Engine is not run")
def test_transformer_engine_equals_torch(qwen3, tmp_path):
    config = megatron(dtype="bfloat16", device="cuda")
    result = launch(config, qwen3, tmp_path, steps=4)
    alone = TorchTrainer(qwen3, TrainerConfig(**SETTINGS))
    for step, metrics in enumerate(result.metrics):
        assert metrics["loss"] == pytest.approx(alone.train_step(make_batch(step), step)["loss"], abs=0.05)
