"""Configuration: strict types, errors that name key, value and remedy, and a lossless resolved form."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rollart.config import Config, dump_config, load_config, parse_config
from rollart.config.check import check_resumable
from rollart.errors import ConfigError


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
        ("run.mode=async", "run.mode", "invalid enum value"),
        ("generation.max_model_len=4", "generation.max_model_len", "at least 22"),
        ("generation.hardware=[B200]", "generation.hardware", "pools offer"),
        ("generation.hardware=[cpu,cpu,cpu]", "generation.hardware", "one for each of the 2 workers"),
        ("generation.affinity={FrozenLake: cpu}", "generation.affinity", "needs an entry named default"),
        ("buffer.group_size=1", "buffer.group_size", "drop_uniform=false"),
        ("run.mode=sync", "buffer.alpha", "set it to 0, or run.mode to rollart"),
        ("run.mode=one_off", "buffer.alpha", "set it to 0, or run.mode to rollart"),
        ("train.lr", "override", "section.key=value"),
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
        ("model.path=/nope", "model.path", "holds no config.json"),
        ("generation.affinity={default: tpu}", "generation.affinity.default", "pools offer cpu"),
        ("generation.workers=600", "pools", "the roles ask for 603"),
        ("pools=[{name: a, hardware: cpu, total: .inf}]", "pools.0.total", "finite"),
        ("pools=[{name: a, hardware: H20, totl: 1}]", "pools.0", "totl"),
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


def test_a_continuation_cannot_change_what_the_checkpoint_depends_on() -> None:
    stored = Config()
    check_resumable(load_config(overrides=["run.iterations=500", "eval.every=3"]), stored)
    with pytest.raises(ConfigError, match=r"model\.hidden.*started with 64"):
        check_resumable(load_config(overrides=["model.hidden=128"]), stored)
    check_resumable(load_config(overrides=["tasks.FrozenLake.max_turns=9"]), stored)
    with pytest.raises(ConfigError, match=r"tasks\.FrozenLake\.size.*started with 4"):
        check_resumable(load_config(overrides=["tasks.FrozenLake.size=5"]), stored)
