"""Configuration: strict types, errors that name key, value and remedy, and a lossless resolved form."""

from __future__ import annotations

import msgspec
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rollart.config import Config, dump_config, load_config, parse_config
from rollart.config.check import check_gpus, check_resumable
from rollart.config.template import template
from rollart.errors import ConfigError
from rollart.models import make_tiny_qwen3
from rollart.plan import plan


@pytest.mark.parametrize(
    ("override", "key", "remedy"),
    [
        ("train.lrr=1", "train.lrr", "did you mean train.lr?"),
        ("trian.lr=1", "trian", "did you mean train?"),
        ("run.batch_groups=3", "run.batch_groups", "did you mean buffer.batch_groups?"),
        ("run.zzz=3", "run.zzz", "valid here: name, folder"),
        ("train.lr=abc", "train.lr", "expected float, got str"),
        ("train.lr=-1", "train.lr", "> 0"),
        ("train.lr=.nan", "train.lr", "> 0"),
        ("buffer.alpha=-0.5", "buffer.alpha", ">= 0"),
        ("buffer.alpha=.inf", "buffer.alpha", "<= 1000"),
        ("buffer.group_size=0", "buffer.group_size", ">= 1"),
        ("run.name=../x", "run.name", "matching"),
        ("run=3", "run", "is a section with keys"),
        ("run.mode=async", "run.mode", "one of rollart, areal, one_off, sync_plus, sync; did you mean sync?"),
        ("train.objective.loss=pppo", "train.objective.loss", "did you mean ppo?"),
        ("train.objective.clip_low=-1", "train.objective.clip_low", ">= 0"),
        ("train.objective.outlier=0.5", "train.objective.outlier", "> 1"),
        ("weights.store=none", "weights.store", "must be one of auto, mooncake, shm"),
        ("weights.store=cuda-ipc", "weights.store", "must be one of auto, mooncake, shm"),
        ("weights.transport=nccl", "weights.transport", "valid here: store, bucket_mb"),
        ("generation.device=cuda", "generation.device", "did you mean train.device?"),
        ("generation.hardware=cpu", "generation.hardware", "is a list; write [cpu]"),
        ("generation.proxies=193", "generation.proxies", "192 or fewer work"),
        ("generation.max_model_len=100000", "generation.kv_cache_mb", "tokens takes 196 MiB; 196 works"),
        ("model.heads=6", "model.heads", "4 key-value heads, of which it must be a multiple; 4 works"),
        ("pools=[]", "pools", "total: 512}] works"),
        ("train.minibatches=129", "train.minibatches", "a batch has 128 trajectories"),
        ("train={minibatch_of: groups, minibatches: 17}", "train.minibatches", "a batch has 16 groups"),
        ("train.micro_tokens=9", "train.micro_tokens", "22 works"),
        ("train={backend: megatron, tensor_parallel: 3}", "train.tensor_parallel", "4 attention heads; 2 works"),
        ("train={backend: megatron, pipeline_parallel: 3}", "train.pipeline_parallel", "2 layers; 2 works"),
        ("train.data_parallel=3", "train.data_parallel", "does not divide the 128 trajectories of a batch; 2 works"),
        ("train.minibatches=2.5", "train.minibatches", "expected int, got float"),
        ("tasks={a: {kind: env, env: x:y, chat: qwen}}", "tasks.a.chat", "did you mean qwen3?"),
        ("generation.max_model_len=4", "generation.max_model_len", "at least 22"),
        ("generation.hardware=[B200]", "generation.hardware", "pools offer"),
        ("generation.hardware=[cpu,cpu,cpu]", "generation.hardware", "one for each of the 2 workers"),
        ("generation.affinity={FrozenLake: cpu}", "generation.affinity", "needs an entry named default"),
        ("buffer.group_size=1", "buffer.group_size", "drop_uniform=false"),
        ("run.mode=sync", "buffer.alpha", "set it to 0, or run.mode to rollart"),
        ("run.mode=one_off", "buffer.alpha", "set it to 0, or run.mode to rollart"),
        ("train.lr", "override", "section.key=value"),
        (".=3", "override", "section.key=value"),
        ("train.=3", "override", "section.key=value"),
        ("train={lr: 1, lr: 2}", "train", "lr is there twice"),
        ("train.lr=[", "train.lr", "not valid YAML"),
        ("buffer.alpha=1e308", "buffer.alpha", "<= 1000"),
        ("run.seed=99999999999999999999", "run.seed", "<= 2147483647"),
        ("weights.bucket_mb=1e-9", "weights.bucket_mb", ">= 0.001"),
        ("tasks.FrozenLake.frozen=1.0", "tasks.FrozenLake.frozen", "<= 0.95"),
        ("tasks.FrozenLake.view=4", "tasks.FrozenLake.view", "5 works"),
        ("task.size=3", "task", "did you mean tasks?"),
        ("tasks.FrozenLake.sise=3", "tasks.FrozenLake.sise", "did you mean tasks.FrozenLake.size?"),
        ("tasks.math={kind: enw}", "tasks.math.kind", "one of frozenlake, env"),
        ("tasks.math={kind: env}", "tasks.math", "env"),
        ("tasks.math=3", "tasks.math", "kind is one of"),
        ("tasks={}", "tasks", "nothing to learn"),
        ("generation.affinity={default: cpu, FrozenLace: cpu}", "generation.affinity.FrozenLace", "FrozenLake?"),
        ("tasks={a: {kind: env, env: x:y, max_tokens: 500}}", "generation.max_model_len", "at least 501"),
        ("tasks={a: {kind: env, env: x:y}, b: {}}", "model.path", "symbols (b) or text"),
        ("tasks.FrozenLake.weight=0", "tasks.FrozenLake.weight", "> 0"),
        ("tasks=5", "tasks", "is a section of names"),
        ("tasks=[a]", "tasks", "is a section of names"),
        ("train.lr=1e308", "train.lr", "<= 1"),
        ("train.objective.entropy_coef=-1e300", "train.objective.entropy_coef", ">= -1"),
        ("run.iterations=99999999999999999999999", "run.iterations", "<= 2147483647"),
        ("eval.episodes=1000000000", "eval.episodes", "<= 100000"),
        ("rollout.concurrency=1000000000", "rollout.concurrency", "<= 100000"),
        ("model.hidden=1000000000", "model.hidden", "<= 16384"),
        ("rollout.step_timeout_s=1e300", "rollout.step_timeout_s", "<= 1"),
        ("model.path=/nope", "model.path", "holds no config.json"),
        ("generation.affinity={default: tpu}", "generation.affinity.default", "pools offer cpu"),
        ("generation.workers=600", "pools", "the roles ask for 603"),
        ("pools=[{name: a, hardware: cpu, total: .inf}]", "pools.0.total", "<= 1"),
        ("pools=[{name: a, hardware: H20, totl: 1}]", "pools.0", "totl"),
        (
            "pools=[{name: a, hardware: cpu, total: 9}, {name: a, hardware: cpu, total: 9}]",
            "pools",
            "2 are named a",
        ),
        ("run.name=2024", "run.name", 'run.name="2024"\''),
        ("run.name=2024-11-30", "run.name", "is text"),
        ("run.folder=~/runs", "run.folder", "~ is not expanded here; write /"),
        ("model.path=~/model", "model.path", "~ is not expanded here; write /"),
    ],
)
def test_bad_input_is_refused_with_key_value_and_remedy(override: str, key: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(overrides=[override])
    assert error.value.key == key
    assert remedy in str(error.value)


def test_a_batch_that_steps_together_needs_room() -> None:
    with pytest.raises(ConfigError, match="at least 192"):
        load_config(
            overrides=["run.mode=sync", "buffer.alpha=0", "buffer.batch_groups=24", "rollout.concurrency=191"]
        )


def test_a_float_needs_no_point_and_an_empty_section_is_its_defaults(tmp_path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("run: {name: a}\ntrain:\n")
    config = load_config(path, ["train.lr=5e-4"])
    assert (config.run.name, config.train.lr) == ("a", 5e-4)
    with pytest.raises(ConfigError, match="is a folder"):
        load_config(tmp_path)


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2\n", "\x00"])
def test_a_file_that_is_not_a_tree_of_sections_is_refused(tmp_path, text: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="config"):
        load_config(path)


def test_a_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load_config(tmp_path / "nowhere.yaml")


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("train: {lr: 0.5, warmup: 7}\n")
    config = load_config(path, ["train.lr=0.25"])
    assert (config.train.lr, config.train.warmup, config.train.grad_clip) == (0.25, 7, 1.0)


@given(
    lr=st.floats(1e-9, 10),
    alpha=st.floats(0, 8),
    workers=st.integers(1, 4),
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True),
)
def test_the_resolved_form_loads_as_the_same_configuration(lr: float, alpha: float, workers: int, name: str) -> None:
    config = parse_config(
        {
            "run": {"name": name},
            "train": {"lr": lr},
            "buffer": {"alpha": alpha},
            "generation": {"workers": workers},
        }
    )
    assert parse_config(yaml.safe_load(dump_config(config))) == config


def test_the_learning_rate_falls_over_the_runs_iterations_unless_it_is_told_otherwise() -> None:
    short, told = load_config(overrides=["run.iterations=20"]), ["run.iterations=20", "train.total=30"]
    assert short.trainer.learning_rate(20) == pytest.approx(short.train.final_lr * short.train.lr)
    assert short.trainer.learning_rate(10) == pytest.approx(0.55 * short.train.lr)
    assert load_config(overrides=told).trainer.total == 30
    assert "0.001, down to 0.0001 after 20 train steps" in plan(short)


def test_a_continuation_with_more_iterations_has_their_schedule(tmp_path) -> None:
    """As the folder of a run keeps its configuration, and `rollart init` writes one."""
    for text in (dump_config(load_config(overrides=["run.iterations=20"])), template(Config())):
        (tmp_path / "config.yaml").write_text(text)
        longer = load_config(tmp_path / "config.yaml", ["run.iterations=40", "run.seed=3"])
        assert (longer.trainer.total, longer.trainer.seed) == (40, 3)


def test_a_continuation_cannot_change_what_the_checkpoint_depends_on() -> None:
    stored = Config()
    check_resumable(load_config(overrides=["run.iterations=500", "eval.every=3"]), stored)
    with pytest.raises(ConfigError, match=r"model\.hidden.*started with 64"):
        check_resumable(load_config(overrides=["model.hidden=128"]), stored)
    with pytest.raises(ConfigError, match=r"train\.backend.*started with 'torch'"):
        check_resumable(load_config(overrides=["train.backend=megatron"]), stored)
    check_resumable(load_config(overrides=["tasks.FrozenLake.max_turns=9"]), stored)
    with pytest.raises(ConfigError, match=r"tasks\.FrozenLake\.size.*started with 4"):
        check_resumable(load_config(overrides=["tasks.FrozenLake.size=5"]), stored)


@pytest.mark.parametrize(
    ("words", "key", "remedy"),
    [
        (["generation.max_model_len=2000"], "generation.max_model_len", "takes 1024 tokens at most; 1024 works"),
        (
            ["weights.segment_mb=1"],
            "weights.segment_mb",
            "4 versions of the model at once, 3 MiB; set it to 3",
        ),
        (["weights.segment_mb=1", "weights.store=shm"], "", ""),
        (["weights.segment_mb=1", "train.dtype=bfloat16", "weights.keep_versions=1"], "", ""),
        (["generation.max_model_len=1024", "generation.kv_cache_mb=2"], "generation.kv_cache_mb", "3 works"),
    ],
)
def test_a_models_folder_says_what_it_takes(tmp_path, words: list[str], key: str, remedy: str) -> None:
    path = make_tiny_qwen3(tmp_path / "model", 0)
    overrides = [f"model.path={path}", *words]
    if not key:
        load_config(overrides=overrides)
        return
    with pytest.raises(ConfigError) as error:
        load_config(overrides=overrides)
    assert error.value.key == key
    assert remedy in str(error.value)


@pytest.mark.parametrize(("pattern", "what"), [("config.json", "a model"), ("tokenizer*", "a tokenizer")])
def test_a_model_folder_without_its_parts_is_refused(tmp_path, pattern: str, what: str) -> None:
    path = make_tiny_qwen3(tmp_path / "model", 0)
    for file in path.glob(pattern):
        file.unlink()
    with pytest.raises(ConfigError, match=f"model.path = .*: name a Hugging Face folder with {what}"):
        load_config(overrides=[f"model.path={path}"])


DAMAGE = {
    "cut off": (
        "model.safetensors",
        lambda whole: whole[:-100],
        "its model.safetensors is no whole safetensors file",
    ),
    "empty": ("model.safetensors", lambda whole: b"", "its model.safetensors is no whole safetensors file"),
    "no JSON": ("config.json", lambda whole: b"hello", "its config.json cannot be read"),
    "a list": ("config.json", lambda whole: b"[1]", "its config.json cannot be read"),
    "a word": ("config.json", lambda whole: whole.replace(b": 1024,", b': "many",'), "max_position_embeddings"),
    "no heads": (
        "config.json",
        lambda whole: whole.replace(b'attention_heads": 4', b'attention_heads": 0'),
        "lacks what a decoder has",
    ),
    "other layers": (
        "config.json",
        lambda whole: whole.replace(b'hidden_layers": 2', b'hidden_layers": 3'),
        "its config.json has 3 layers, its weights 2",
    ),
    "other words": (
        "config.json",
        lambda whole: whole.replace(b'vocab_size": 16', b'vocab_size": 99'),
        "by config.json it is (99, 64)",
    ),
    "no decoder": (
        "config.json",
        lambda whole: whole.replace(b"Qwen3ForCausalLM", b"BertModel"),
        "(BertModel) is no causal language model",
    ),
    "no index": ("model.safetensors.index.json", lambda whole: b"{}", "has no weight_map"),
    "no shard": (
        "model.safetensors.index.json",
        lambda whole: b'{"weight_map": {"a": "b.safetensors"}}',
        "its b.safetensors is no whole safetensors file",
    ),
    "no tensor": (
        "model.safetensors.index.json",
        lambda whole: b'{"weight_map": {"a": "model.safetensors"}}',
        "says that model.safetensors holds a, which it does not",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_model_folder_is_refused_by_the_files_name(tmp_path, damage: str) -> None:
    path = make_tiny_qwen3(tmp_path / "model", 0)
    name, change, said = DAMAGE[damage]
    before = (path / name).read_bytes() if (path / name).exists() else b""
    (path / name).write_bytes(change(before))
    assert (path / name).read_bytes() != before
    with pytest.raises(ConfigError) as error:
        load_config(overrides=[f"model.path={path}"])
    assert error.value.key == "model.path"
    assert said in str(error.value)


def test_a_path_that_can_be_no_folders_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.path = .*name a Hugging Face folder"):
        load_config(overrides=[f"model.path={'x' * 5000}"])


def gpu_config(**given: float) -> Config:
    """On any machine: what is checked is put in after loading."""
    config = Config()
    generation = msgspec.structs.replace(
        config.generation, gpus=given["engine"], workers=int(given.get("workers", 2))
    )
    train = msgspec.structs.replace(config.train, device="cuda", gpus=given.get("rank", 1.0))
    return msgspec.structs.replace(config, generation=generation, train=train)


@pytest.mark.parametrize(
    ("given", "gpus", "message"),
    [
        ({"engine": 1}, 0, "generation.gpus = 1: this machine has no GPU that torch can use; 0 .* works"),
        ({"engine": 1.5}, 8, "counts tensor-parallel ranks; 1 works"),
        ({"engine": 4}, 8, "2 engines and the trainer's 1 take 9 GPUs, and this machine has 8"),
        ({"engine": 0.5, "workers": 1}, 1, "take 1.5 GPUs, and this machine has 1; lower it, .* or train.gpus"),
    ],
)
def test_engines_and_trainer_must_fit_the_gpus(given: dict[str, float], gpus: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_gpus(gpu_config(**given), gpus)


def test_engines_and_trainer_that_fit_the_gpus() -> None:
    check_gpus(gpu_config(engine=2, workers=3), 8)
    check_gpus(gpu_config(engine=0.5, workers=1, rank=0.5), 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, which is what the refusal is about")
def test_gpu_settings_without_gpus_are_refused() -> None:
    for override, key in (("generation.gpus=1", "generation.gpus"), ("train.device=cuda", "train.device")):
        with pytest.raises(ConfigError, match=r"this machine has no GPU that torch can use.* works") as error:
            load_config(overrides=[override])
        assert error.value.key == key
