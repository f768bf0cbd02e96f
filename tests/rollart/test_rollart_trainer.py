"""The torch trainer: parity with a plain forward pass, exact resumption, micro-batches, several processes."""

from __future__ import annotations

import asyncio
import multiprocessing
import socket

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist

from rollart.algorithms import ObjectiveConfig
from rollart.errors import ConfigError, Diverged
from rollart.models import make_tiny_qwen3
from rollart.trainers import TorchTrainer, TrainBatch, TrainerConfig, TrainerState
from rollart.trainers.micro_batch import share
from rollart.trainers.state import read_state, restore_state
from weightsync import FileStore, Publisher, ShardedSubscriber

pytestmark = pytest.mark.seconds

ALLOWED = (9, 10, 11, 12)
CONFIG = TrainerConfig(lr=1e-2, minibatches=2, objective=ObjectiveConfig(loss="tis", entropy_coef=0.01))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_tiny_qwen3(tmp_path_factory.mktemp("trainer") / "tiny", 5, hidden=32, heads=2, kv_heads=2, layers=2)


def make_batch(seed=0, trajectories=6, width=10):
    """Rows of several lengths, two a trajectory, with equal contexts among them."""
    rng = np.random.default_rng(seed)
    rows = 2 * trajectories
    ids = rng.integers(2, 9, (rows, width))
    ids[1] = ids[0]
    mask = np.zeros((rows, width), dtype=np.bool_)
    lengths = rng.integers(5, width + 1, rows)
    lengths[:2] = width
    for row, length in enumerate(lengths):
        mask[row, length - rng.integers(1, 3) : length] = True
        ids[row, length:] = 0
    ids[mask] = rng.choice(ALLOWED, mask.sum())
    return TrainBatch(
        input_ids=ids,
        loss_mask=mask,
        behaviour_logprobs=np.where(mask, np.log(0.25) + rng.normal(0, 0.1, ids.shape), 0).astype(np.float32),
        advantages=np.where(mask, rng.normal(0, 1, (rows, 1)), 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        lengths=lengths,
        trajectory=np.repeat(np.arange(trajectories), 2),
        group=np.repeat(np.arange(trajectories // 2), 2),
        rewards=np.zeros(trajectories, dtype=np.float32),
        allowed=np.zeros(rows, dtype=np.int64),
        allowed_sets=(ALLOWED,),
    )


def weights(trainer):
    return {name: tensor.clone() for name, tensor in trainer.named_tensors().items()}


def distance(a, b):
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def test_logprobs_equal_a_plain_forward_pass(model_dir):
    trainer = TorchTrainer(model_dir)
    prompts, tokens = [[2, 3, 4], [5, 6, 7, 8, 3]], [[9, 12], [10]]
    masked = trainer.logprobs(prompts, tokens, ALLOWED)
    plain = trainer.logprobs(prompts, tokens)
    for prompt, generated, with_mask, without in zip(prompts, tokens, masked, plain, strict=True):
        logits = trainer.model(input_ids=torch.tensor([prompt + generated])).logits[0].detach().double()
        for i, token in enumerate(generated):
            row = logits[len(prompt) + i - 1]
            assert with_mask[i] == pytest.approx(float(row[token] - row[list(ALLOWED)].logsumexp(0)), abs=1e-6)
            assert without[i] == pytest.approx(float(row[token] - row.logsumexp(0)), abs=1e-6)


def test_micro_batches_and_shared_contexts_change_nothing(model_dir):
    batch = make_batch()
    small = TorchTrainer(model_dir, TrainerConfig(lr=1e-2, minibatches=2, micro_tokens=12))
    large = TorchTrainer(model_dir, TrainerConfig(lr=1e-2, minibatches=2))
    a, b = small.train_step(batch, 0), large.train_step(batch, 0)
    assert distance(weights(small), weights(large)) < 1e-4
    assert a == pytest.approx(b, rel=1e-3, abs=1e-5)
    (shared,) = share(batch, np.array([0, 1]), 10_000)
    assert len(shared.contexts) <= 2
    for part in share(batch, batch.trained_rows, 25):
        assert part.contexts.numel() <= 25 or len(np.unique(part.row)) == 1


@pytest.mark.parametrize("ranks", [1, 2, 3, 16])
def test_ranks_share_the_rows(ranks):
    batch = make_batch()
    parts = [share(batch, batch.trained_rows, 25, rank, ranks) for rank in range(ranks)]
    assert len({len(part) for part in parts}) == 1, "passes are collective"
    counted = [micro for part in parts for micro in part if micro.counts]
    places = np.concatenate([np.stack([micro.row, micro.column]) for micro in counted], axis=1)
    seen = np.zeros(batch.loss_mask.shape, dtype=int)
    np.add.at(seen, tuple(places), 1)
    np.testing.assert_array_equal(seen, batch.loss_mask)


def test_the_examples_loss_gives_the_numbers_that_it_gave(model_dir):
    """Recorded before the trainers were given passes, pieces and backends: the default way must not drift."""
    config = TrainerConfig(
        lr=1e-2,
        total=80,
        minibatches=2,
        micro_tokens=40,
        objective=ObjectiveConfig(loss="ppo", clip_low=0.2, clip_high=0.28, entropy_coef=0.01),
    )
    trainer = TorchTrainer(model_dir, config)
    steps = [trainer.train_step(make_batch(step), step) for step in range(4)]
    assert [each["loss"] for each in steps] == pytest.approx([-0.202129, 0.065242, 0.050085, 0.089998], abs=1e-4)
    assert [each["grad_norm"] for each in steps] == pytest.approx([3.54542, 1.18214, 1.03912, 1.60999], rel=1e-3)


def test_restored_trainer_goes_on_exactly(model_dir, tmp_path):
    first = TorchTrainer(model_dir, CONFIG)
    for step in range(2):
        first.train_step(make_batch(step), step)
    first.state_dict().save(tmp_path)
    second = TorchTrainer(model_dir, CONFIG)
    second.load_state_dict(TrainerState.load(tmp_path))
    assert second.version == 2
    for step in range(2, 4):
        assert first.train_step(make_batch(step), step) == second.train_step(make_batch(step), step)
    assert distance(weights(first), weights(second)) == 0


def test_a_restored_optimizer_is_where_its_parameters_are():
    """A checkpoint is read to the CPU; the model may be on a GPU, for which `meta` stands here."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    elsewhere = torch.nn.Linear(2, 2, device="meta")
    restored = torch.optim.AdamW(elsewhere.parameters())
    restore_state(elsewhere, restored, read_state(model, optimizer, 1))
    for slots in restored.state.values():
        assert {slot: value.device.type for slot, value in slots.items()} == {
            "step": "cpu",
            "exp_avg": "meta",
            "exp_avg_sq": "meta",
        }


def test_incomplete_state_is_refused(model_dir, tmp_path):
    from safetensors.torch import load_file, save_file

    trainer = TorchTrainer(model_dir, CONFIG)
    trainer.state_dict().save(tmp_path)
    tensors = load_file(tmp_path / "trainer.safetensors")
    tensors.pop(next(iter(tensors)))
    save_file(tensors, tmp_path / "trainer.safetensors")
    with pytest.raises(ValueError, match="incomplete"):
        TrainerState.load(tmp_path)


def test_steps_come_in_order(model_dir):
    trainer = TorchTrainer(model_dir, CONFIG)
    trainer.train_step(make_batch(), 0)
    assert trainer.version == 1
    for step in (0, 2):
        with pytest.raises(ValueError, match="next train step of this trainer is 1"):
            trainer.train_step(make_batch(), step)


def test_a_gradient_that_is_no_number_ends_training(model_dir):
    trainer = TorchTrainer(model_dir, TrainerConfig(lr=1e9, warmup=0, minibatches=4))
    with pytest.raises(Diverged, match=r"train step 0: the gradient's norm is (nan|inf); lower train\.lr"):
        trainer.train_step(make_batch(), 0)


def test_a_step_raises_what_was_rewarded(model_dir):
    trainer = TorchTrainer(model_dir, TrainerConfig(lr=1e-2, warmup=0, minibatches=1))
    batch = make_batch()
    before = trainer.score(batch).numpy()
    metrics = trainer.train_step(batch, 0)
    after = trainer.score(batch).numpy()
    assert (batch.advantages * (after - before))[batch.loss_mask].sum() > 0
    assert metrics["grad_norm"] > 0 and metrics["updates"] == 1
    assert metrics["tokens"] == batch.trained_tokens


@pytest.mark.parametrize(
    "objective",
    [
        ObjectiveConfig(loss="decoupled_ppo"),
        ObjectiveConfig(loss="grpo", kl_coef=0.1, aggregation="sequence_mean"),
        ObjectiveConfig(loss="tis", mismatch_cap=5.0, outlier=2.0),
    ],
    ids=["decoupled", "grpo-kl", "mismatch"],
)
def test_losses_that_need_other_policies_get_them(model_dir, objective):
    trainer = TorchTrainer(model_dir, TrainerConfig(lr=1e-2, warmup=0, minibatches=2, objective=objective))
    metrics = [trainer.train_step(make_batch(step), step) for step in range(2)][-1]
    assert all(np.isfinite(value) for value in metrics.values())
    assert ("kl" in metrics) == bool(objective.kl_coef)
    assert ("mismatch" in metrics) == (objective.mismatch_cap is not None)
    if objective.kl_coef:
        assert metrics["kl"] > 0


def test_logits_that_are_more_than_a_matrix_are_refused(tmp_path):
    from transformers import AutoTokenizer, Gemma2Config, Gemma2ForCausalLM

    folder = make_tiny_qwen3(tmp_path / "model", 0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = Gemma2Config(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
    )
    Gemma2ForCausalLM(config).save_pretrained(tmp_path / "gemma")
    tokenizer.save_pretrained(tmp_path / "gemma")
    with pytest.raises(ConfigError, match=r"final_logit_softcapping is set.*Qwen3 and Llama work"):
        TorchTrainer(tmp_path / "gemma")


def test_learning_rate_warms_up_and_decays():
    config = TrainerConfig(lr=1.0, warmup=4, total=10, final_lr=0.1)
    rates = [config.learning_rate(step) for step in range(20)]
    assert rates[:2] == pytest.approx([0.25, 0.5 * 0.91])
    assert rates[5] == pytest.approx(0.55)
    assert rates[10:] == pytest.approx([0.1] * 10)
    alone = TrainerConfig(lr=1.0, warmup=4)
    assert [alone.learning_rate(step) for step in (3, 1000)] == [1.0, 1.0]


SHARDED = msgspec.structs.replace(
    CONFIG,
    checkpoint_activations=True,
    objective=ObjectiveConfig(loss="grpo", kl_coef=0.1, outlier=3.0, entropy_coef=0.01),
)


def _rank(rank, port, model_dir, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    trainer = TorchTrainer(model_dir, SHARDED)
    trainer.train_step(make_batch(0), 0)
    trainer.save(folder)
    trainer.restore(folder)
    metrics = trainer.train_step(make_batch(1), 1)
    trainer.save(folder)
    trainer.export(folder / "exported")
    asyncio.run(_publish(folder / f"store-{rank}", *trainer.shards()))
    half = TorchTrainer(model_dir, msgspec.structs.replace(SHARDED, dtype="bfloat16"))
    near = half.train_step(make_batch(0), 0)
    if rank == 0:
        np.save(folder / "metrics.npy", sorted(metrics.items()))
        np.save(folder / "near.npy", sorted(near.items()))
    assert {tensor.dtype for tensor in half.shards()[0].values()} == {torch.bfloat16}
    dist.destroy_process_group()


async def _publish(folder, tensors, shards):
    store = FileStore(folder)
    await Publisher(store, bucket_bytes=4096).publish(2, tensors, shards)
    await store.close()


async def _pull(folders):
    stores = [FileStore(folder) for folder in folders]
    subscriber = ShardedSubscriber(stores, {})
    found = {}
    staged = await subscriber.prefetch(2, timeout=10)
    await subscriber.commit(staged, lambda name, tensor: found.update({name: tensor.torch().clone()}))
    await subscriber.close()
    for store in stores:
        await store.close()
    return found


@pytest.mark.real
def test_two_processes_equal_one(model_dir, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_rank, args=(rank, port, model_dir, tmp_path)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
        assert process.exitcode == 0
    alone = TorchTrainer(model_dir, SHARDED)
    first, metrics = (alone.train_step(make_batch(step), step) for step in range(2))
    shared = TrainerState.load(tmp_path).tensors
    assert distance({f"model.{k}": v for k, v in weights(alone).items()}, shared) < 2e-5
    found = {name: float(value) for name, value in np.load(tmp_path / "metrics.npy")}
    assert found == pytest.approx(metrics, rel=1e-3, abs=1e-5)
    near = {name: float(value) for name, value in np.load(tmp_path / "near.npy")}
    assert near["loss"] == pytest.approx(first["loss"], abs=0.02)
    pulled = asyncio.run(_pull([tmp_path / "store-0", tmp_path / "store-1"]))
    assert {f"model.{name}": tensor.tolist() for name, tensor in pulled.items()} == {
        name: tensor.tolist() for name, tensor in shared.items() if name.startswith("model.")
    }
    again = TorchTrainer(tmp_path / "exported", SHARDED)
    assert distance({f"model.{k}": v for k, v in weights(again).items()}, shared) == 0


def test_activations_are_computed_again_to_the_same_gradient(model_dir):
    kept, again = (
        TorchTrainer(model_dir, msgspec.structs.replace(CONFIG, checkpoint_activations=value))
        for value in (False, True)
    )
    assert kept.train_step(make_batch(), 0) == again.train_step(make_batch(), 0)
    assert distance(weights(kept), weights(again)) == 0


def test_logits_in_pieces_change_nothing(model_dir, monkeypatch):
    whole, pieces = TorchTrainer(model_dir, CONFIG), TorchTrainer(model_dir, CONFIG)
    monkeypatch.setattr(pieces._policy, "_logits_bytes", 3 * 16 * 4)
    a, b = whole.train_step(make_batch(), 0), pieces.train_step(make_batch(), 0)
    assert a == pytest.approx(b, rel=1e-4, abs=1e-6)
    assert distance(weights(whole), weights(pieces)) < 1e-5


def test_bfloat16_computes_near_and_keeps_float32(model_dir):
    whole, half = (
        TorchTrainer(model_dir, CONFIG),
        TorchTrainer(model_dir, msgspec.structs.replace(CONFIG, dtype="bfloat16")),
    )
    for step in range(3):
        a, b = whole.train_step(make_batch(step), step), half.train_step(make_batch(step), step)
        assert a["loss"] == pytest.approx(b["loss"], abs=0.02)
    assert {parameter.dtype for parameter in half.model.parameters()} == {torch.float32}
    assert {tensor.dtype for tensor in half.named_tensors().values()} == {torch.bfloat16}


def test_several_passes_are_one_version(model_dir):
    """The proximal policy stays that of the step's start, so the second pass sees a ratio that moved."""
    config = msgspec.structs.replace(
        CONFIG,
        warmup=0,
        ppo_epochs=3,
        minibatch_of="groups",
        minibatches=2,
        objective=ObjectiveConfig(loss="decoupled_ppo"),
    )
    trainer = TorchTrainer(model_dir, config)
    metrics = trainer.train_step(make_batch(), 0)
    assert trainer.version == 1
    assert metrics["updates"] == 6
    once = TorchTrainer(model_dir, msgspec.structs.replace(config, ppo_epochs=1)).train_step(make_batch(), 0)
    assert metrics["bounded"] > once["bounded"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: the CUDA path of the torch trainer is not run")
def test_a_gpu_computes_near_the_cpu(model_dir):
    for dtype, limit in (("float32", 1e-3), ("bfloat16", 0.05)):
        cpu = TorchTrainer(model_dir, CONFIG)
        gpu = TorchTrainer(model_dir, msgspec.structs.replace(CONFIG, device="cuda", dtype=dtype))
        for step in range(3):
            a, b = cpu.train_step(make_batch(step), step), gpu.train_step(make_batch(step), step)
            assert a["loss"] == pytest.approx(b["loss"], abs=limit)
