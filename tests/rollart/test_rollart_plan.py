"""The plan of a dry run says what would run, and counts parameters as the model has them."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open

from rollart.cli.main import main
from rollart.config import load_config
from rollart.models import make_tiny_qwen3
from rollart.plan import plan, requests, tiny_parameters

EXAMPLE = Path(__file__).parents[2] / "examples" / "frozenlake.yaml"


@pytest.mark.parametrize(("hidden", "layers", "heads"), [(64, 2, 4), (32, 3, 2)])
def test_parameters_are_those_of_the_model(tmp_path: Path, hidden: int, layers: int, heads: int) -> None:
    shape = [f"model={{hidden: {hidden}, layers: {layers}, heads: {heads}}}"]
    folder = make_tiny_qwen3(tmp_path / "m", 0, hidden=hidden, layers=layers, heads=heads, kv_heads=heads)
    with safe_open(folder / "model.safetensors", "pt") as file:
        stored = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118 - not a dictionary
    if heads == 4:
        assert tiny_parameters(load_config(overrides=shape)) == stored


@pytest.mark.parametrize("recipe", ["frozenlake", "gem_math", "gem_game", "shop", "textworld", "swe", "mixture"])
def test_every_recipe_has_a_plan(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    if recipe == "textworld":
        pytest.importorskip("textworld")
    assert main(["train", str(EXAMPLE.with_name(f"{recipe}.yaml")), "--dry-run"]) == 0
    assert "GiB in all" in capsys.readouterr().out


def test_a_dry_run_refuses_a_task_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("tasks: {a: {kind: env, env: 'gymnasium:Taxi-v4', reward: 'nowhere:score'}}\n")
    assert main(["train", str(path), "--dry-run"]) == 2
    assert "tasks.a.reward = 'nowhere:score'" in capsys.readouterr().err


def test_a_dry_run_prints_the_plan_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(EXAMPLE), "--dry-run", f"run.folder={tmp_path}", "buffer.spare_groups=3"]) == 0
    text = capsys.readouterr().out
    for fact in (
        "resources",
        "processes",
        "GiB in all",
        "24 groups of 8 = 192",
        "staleness at most 1",
        "3 spare groups",
    ):
        assert fact in text
    assert list(tmp_path.iterdir()) == []


def test_each_worker_asks_for_its_class_and_accepts_the_others() -> None:
    pools = "pools=[{name: a, hardware: H800, total: 4}, {name: b, hardware: H20, total: 4}]"
    config = load_config(overrides=[pools, "generation={hardware: [H20, H800], affinity: {default: H20}}"])
    asked = requests(config)
    assert asked["gen-0"] == (["H20", "H800"], 1.0)
    assert asked["gen-1"] == (["H800", "H20"], 1.0)
    assert "gen-0: 1 of H20, else H800" in plan(config)


@pytest.mark.parametrize(("turns", "said"), [(20, "128 tokens, room for 5 turns that use all"), (5, "")])
def test_a_context_that_holds_fewer_turns_than_an_episode_may_have_is_told(turns: int, said: str) -> None:
    text = plan(load_config(overrides=[f"tasks={{a: {{kind: env, env: x:y, max_tokens: 24, max_turns: {turns}}}}}"]))
    assert said in text
    assert ("context" in text) == bool(said)
