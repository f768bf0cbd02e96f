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
from rollart.models import make_tiny_llama, make_tiny_qwen3
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


class Case(msgspec.Struct):
    """One trainer: what it is made from, and how far it trains."""

    config: TrainerConfig
    model: str
    out: str
    steps: int = 8


class Result(msgspec.Struct):
    """What rank 0 of a trainer says."""

    metrics: list[dict[str, float]]
    repeated: list[dict[str, float]]
    logprobs: list[list[float]]


def _rank(rank: int, cases: list[Case], port: int) -> None:
    torch.set_num_threads(1)
    join(cases[0].config, rank, f"127.0.0.1:{port}")
    for case in cases:
        _run(rank, case)
    torch.distributed.destroy_process_group()


def _run(rank: int, case: Case) -> None:
    trainer, out, half = open_trainer(case.model, case.config), Path(case.out), case.steps // 2
    trainer.export(out / "exported")
    metrics = []
    for step in range(case.steps):
        if step == half:
            trainer.save(out)
        metrics.append(trainer.train_step(make_batch(step), step))
    logprobs = trainer.logprobs(PROMPTS, TOKENS, ALLOWED)
    weights = {name: tensor.clone() for name, tensor in trainer.stream()}
    asyncio.run(_publish(out / f"store-{rank}", *trainer.shards()))
    trainer.restore(out)
    assert trainer.version == half
    repeated = [trainer.train_step(make_batch(step), step) for step in range(half, case.steps)]
    if rank == 0:
        save_file(weights, out / "weights.safetensors")
        (out / "result.json").write_bytes(msgspec.json.encode(Result(metrics, repeated, logprobs)))
    trainer.close()


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


def launch(cases: list[Case]) -> None:
    """All cases, one after the other, in as many processes as each of them has."""
    for case in cases:
        Path(case.out).mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    count = cases[0].config.processes
    ranks = [context.Process(target=_rank, args=(rank, cases, port)) for rank in range(count)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0] * count


def bits(folder: Path) -> dict[str, tuple[torch.dtype, bytes]]:
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return {name: (tensor.dtype, tensor.view(torch.uint8).numpy().tobytes()) for name, tensor in tensors.items()}


def bits_of(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: tensor.contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


def check(case: Case, limit: float = 1e-4) -> None:
    """A trainer against the torch trainer in this process, on the same batches."""
    out, half = Path(case.out), case.steps // 2
    result = msgspec.json.decode((out / "result.json").read_bytes(), type=Result)
    assert result.repeated == result.metrics[half:], "a restored trainer goes on exactly"
    alone = TorchTrainer(case.model, alone_config(case.config))
    for step, metrics in enumerate(result.metrics):
        expected = alone.train_step(make_batch(step), step)
        for name in ("loss", "policy_loss", "entropy", "behaviour_gap", "behaviour_kl", "ratio"):
            assert metrics[name] == pytest.approx(expected[name], abs=limit), (step, name)
        assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=100 * limit), step
        assert metrics.keys() == expected.keys()
    for ours, theirs in zip(result.logprobs, alone.logprobs(PROMPTS, TOKENS, ALLOWED), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=10 * limit)
    weights = load_file(out / "weights.safetensors")
    assert set(weights) == set(ModelFolder.read(case.model).files)
    pulled = asyncio.run(_pull(sorted(out.glob("store-*"))))
    assert bits_of(pulled) == bits_of(weights), "the ranks' shards are the whole"
    if case.config.dtype == "float32":
        assert bits(out / "exported") == bits(Path(case.model)), "what was loaded is exported bit by bit"


def alone_config(config: TrainerConfig) -> TrainerConfig:
    layout = {"data_parallel": 1, "tensor_parallel": 1, "pipeline_parallel": 1}
    return msgspec.structs.replace(config, backend="torch", device="cpu", dtype="float32", **layout)


def megatron(**given: Any) -> TrainerConfig:
    return TrainerConfig(backend="megatron", **{**SETTINGS, **given})


def make_qwen3(folder: Path) -> str:
    return str(make_tiny_qwen3(folder, 5, hidden=32, heads=4, kv_heads=2, layers=2))


@pytest.mark.timeout(300)
def test_tensor_parallel_equals_torch(tmp_path):
    case = Case(megatron(tensor_parallel=2), make_qwen3(tmp_path / "model"), str(tmp_path / "out"), steps=4)
    launch([case])
    check(case)


TWENTY = {
    "tensor": megatron(tensor_parallel=2),
    "pipeline": megatron(pipeline_parallel=2),
    "data": megatron(data_parallel=2),
}
EIGHT = {
    "plain optimizer": megatron(data_parallel=2, distributed_optimizer=False),
    "grpo": megatron(
        tensor_parallel=2, objective=ObjectiveConfig(loss="grpo", kl_coef=0.1, aggregation="sequence_mean")
    ),
    "decoupled": megatron(pipeline_parallel=2, objective=ObjectiveConfig(loss="decoupled_ppo", outlier=3.0)),
    "epochs": megatron(
        data_parallel=2,
        objective=ObjectiveConfig(loss="tis", mismatch_cap=5.0),
        ppo_epochs=2,
        minibatch_of="groups",
    ),
    "activations": megatron(tensor_parallel=2, checkpoint_activations=True),
}
LLAMA = {
    "llama tensor": (megatron(tensor_parallel=2), False),
    "llama pipeline tied": (megatron(pipeline_parallel=2), True),
    "llama tensor tied": (megatron(tensor_parallel=2), True),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """All layouts of two processes, trained in the same two: starting Megatron is what takes long."""
    folder = tmp_path_factory.mktemp("megatron")
    qwen3 = make_qwen3(folder / "qwen3")
    models = {tied: str(make_tiny_llama(folder / f"llama-{tied}", 3, tied=tied)) for tied in (False, True)}
    cases = {name: Case(config, qwen3, str(folder / name), steps=20) for name, config in TWENTY.items()}
    cases |= {name: Case(config, qwen3, str(folder / name)) for name, config in EIGHT.items()}
    cases |= {name: Case(config, models[tied], str(folder / name)) for name, (config, tied) in LLAMA.items()}
    cases["bfloat16"] = Case(megatron(dtype="bfloat16", data_parallel=2), qwen3, str(folder / "bfloat16"))
    launch(list(cases.values()))
    return cases


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [*TWENTY, *EIGHT, *LLAMA])
def test_two_processes_equal_torch(trained, name):
    check(trained[name])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_bfloat16_is_near_torch(trained):
    case = trained["bfloat16"]
    check(case, limit=0.05)
    weights = load_file(Path(case.out) / "weights.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_process_equals_torch(tmp_path):
    case = Case(megatron(), make_qwen3(tmp_path / "model"), str(tmp_path / "out"), steps=20)
    launch([case])
    check(case)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_processes_equal_torch(tmp_path):
    config = megatron(tensor_parallel=2, pipeline_parallel=2)
    case = Case(config, make_qwen3(tmp_path / "model"), str(tmp_path / "out"))
    launch([case])
    check(case)


@pytest.mark.parametrize(
    ("key", "value"),
    [("attention_bias", True), ("hidden_act", "gelu"), ("use_sliding_window", True), ("model_type", "qwen2")],
)
def test_models_it_would_compute_differently_are_refused(tmp_path, key, value):
    from rollart.trainers.megatron_model import check_supported

    folder = ModelFolder.read(make_qwen3(tmp_path / "model"))
    folder.config[key] = value
    with pytest.raises(ConfigError, match=f"{key} = {value!r}.*torch works"):
        check_supported(folder)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: Megatron with Transformer Engine is not run")
def test_transformer_engine_equals_torch(tmp_path):
    config = megatron(dtype="bfloat16", device="cuda")
    case = Case(config, make_qwen3(tmp_path / "model"), str(tmp_path / "out"), steps=4)
    launch([case])
    check(case, limit=0.05)
