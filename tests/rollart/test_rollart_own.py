"""A task and a loss from somebody's own module: keys checked as ours are, and kept through a run's folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

from rollart.algorithms import ObjectiveConfig, Tokens, objective
from rollart.config import dump_config, load_config, parse_config
from rollart.config.check import check_resumable
from rollart.config.template import template
from rollart.errors import ConfigError
from rollart.models import make_tiny_qwen3
from rollart.plan import plan
from rollart.runtime.setting import Setting, prepare_model
from rollart.trainers.config import TrainerConfig
from rollart.trainers.torch_trainer import TorchTrainer

MODULE = """
from typing import Literal

import torch

from llmproxy import Sampling
from rollart.algorithms import TokenLoss
from rollart.chat import Plain
from rollart.config.tasks import Count
from rollart.policy import TurnSettings
from rollart.tasks import EnvironmentTask, TaskConfig


class Guess:
    def __init__(self, largest):
        self.largest = largest

    def reset(self, seed=None):
        return f"below {self.largest}?", {}

    def step(self, action):
        return "", 1.0, True, False, {}


class Guesses(EnvironmentTask):
    class Config(TaskConfig, frozen=True):
        largest: Count = 9
        \"\"\"Of the numbers.\"\"\"
        manner: Literal["kind", "rude"] = "kind"
        max_tokens: Count = 3

    def __init__(self, name, config, codec, context):
        if config.largest == 13:
            raise ValueError("13 brings bad luck; 12 works")
        settings = TurnSettings(
            task=name, format=Plain(codec), max_tokens=config.max_tokens, sampling=Sampling(),
            latest_only=config.latest_only, context=context,
        )
        super().__init__(settings, lambda key: Guess(config.largest), probes=["below 3?"])


class Bare:
    pass


def plain(logprobs, behaviour, advantages):
    return -advantages * logprobs


def bounded(logprobs, behaviour, advantages):
    return TokenLoss(-advantages * logprobs, torch.ones_like(logprobs, dtype=torch.bool))


def total(logprobs, behaviour, advantages):
    return (-advantages * logprobs).sum()
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`ownmodule` in the current directory."""
    (tmp_path / "ownmodule.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    import sys

    sys.modules.pop("ownmodule", None)


def tasks(**keys: object) -> dict[str, object]:
    return {"tasks": {"Mine": {"kind": "ownmodule:Guesses", **keys}}}


@pytest.mark.parametrize(
    ("keys", "key", "remedy"),
    [
        ({"largst": 3}, "tasks.Mine.largst", "did you mean tasks.Mine.largest?"),
        ({"largest": 0}, "tasks.Mine.largest", "expected int >= 1"),
        ({"manner": "rud"}, "tasks.Mine.manner", "must be one of kind, rude; did you mean rude?"),
        ({"weight": 0}, "tasks.Mine.weight", "> 0"),
        ({"max_tokens": 500}, "generation.max_model_len", "at least 501"),
        ({"kind": "ownmodule:Gueses"}, "tasks.Mine.kind", "cannot be imported"),
        ({"kind": "nomodule:Guesses"}, "tasks.Mine.kind", "No module named 'nomodule'"),
        ({"kind": "ownmodule:Bare"}, "tasks.Mine.kind", "class Config(rollart.tasks.TaskConfig, frozen=True)"),
        ({"kind": "ownmodule"}, "tasks.Mine.kind", "or module:Class of your own"),
        ({"kind": ["env"]}, "tasks.Mine.kind", "or module:Class of your own"),
    ],
)
def test_keys_of_ones_own_are_refused_as_ours_are(keys: dict[str, object], key: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(tasks(**keys))
    assert error.value.key == key
    assert remedy in str(error.value)


def test_a_task_of_ones_own_is_played_by_its_keys(tmp_path: Path) -> None:
    config = parse_config(tasks(largest=5, max_turns=2))
    setting = Setting(config, prepare_model(config, tmp_path))
    (key,) = setting.tasks.eval_keys(1)
    assert setting.make_env(key).reset() == ("below 5?", {})
    assert setting.settings(key).max_tokens == 3
    assert setting.limits(key).max_turns == 2
    assert "Mine: ownmodule:Guesses, up to 2 turns" in plan(config)


def test_what_a_task_refuses_names_it(tmp_path: Path) -> None:
    config = parse_config(tasks(largest=13))
    with pytest.raises(ConfigError, match=r"tasks\.Mine = 'ownmodule:Guesses': 13 brings bad luck; 12 works"):
        Setting(config, prepare_model(config, tmp_path))


def test_a_run_folder_keeps_a_task_of_ones_own() -> None:
    config = parse_config(tasks(largest=5))
    again = parse_config(yaml.safe_load(dump_config(config)))
    assert again == config
    check_resumable(again, config)
    with pytest.raises(ConfigError, match=r"tasks\.Mine\.largest = 6: the run was started with 5"):
        check_resumable(parse_config(tasks(largest=6)), config)
    text = template(config)
    assert "# Of the numbers." in text
    assert parse_config(yaml.safe_load(text)) == config


@pytest.mark.parametrize(
    ("loss", "remedy"),
    [
        ("ownmodule:plane", "'ownmodule:plane' cannot be imported"),
        ("nomodule:plain", "No module named 'nomodule'"),
        ("cipso", "must be one of ppo, grpo, .* or module:function of your own; did you mean cispo"),
    ],
)
def test_a_loss_that_is_not_there_is_refused(loss: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=rf"train\.objective\.loss = '{loss}': .*{remedy}"):
        load_config(overrides=[f"train.objective.loss={loss}"])
    with pytest.raises(Exception, match="cannot be imported"):
        TorchTrainer(make_tiny_qwen3(Path("model"), 0), TrainerConfig(objective=ObjectiveConfig(loss="ownmodule:no")))


@pytest.mark.parametrize(("loss", "share"), [("ownmodule:plain", 0.0), ("ownmodule:bounded", 1.0)])
def test_a_loss_of_ones_own_is_what_is_minimized(loss: str, share: float) -> None:
    logprobs = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]], requires_grad=True)
    mask = torch.tensor([[True, True], [True, False]])
    tokens = Tokens(mask=mask, behaviour=torch.zeros(2, 2), advantages=torch.tensor([[1.0, 1.0], [-2.0, -2.0]]))
    value, metrics = objective(ObjectiveConfig(loss=loss), logprobs, torch.zeros(2, 2), tokens, mask / 3)
    assert float(value.detach()) == pytest.approx((1 + 2 - 6) / 3)
    assert float(metrics["bounded"]) == pytest.approx(share)
    value.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [pytest.approx([-1 / 3, -1 / 3]), pytest.approx([2 / 3, 0.0])]


def test_a_loss_that_is_none_for_each_token_is_refused() -> None:
    tokens = Tokens(mask=torch.ones(2, 2, dtype=torch.bool), behaviour=torch.zeros(2, 2), advantages=torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"ownmodule:total gives shape \(\); give a loss for each token, \(2, 2\)"):
        objective(
            ObjectiveConfig(loss="ownmodule:total"),
            torch.zeros(2, 2),
            torch.zeros(2, 2),
            tokens,
            torch.full((2, 2), 0.25),
        )
