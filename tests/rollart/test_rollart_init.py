"""`rollart init` writes every key, explained, and the file loads as the defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollart.cli.main import main
from rollart.config import Config, load_config
from rollart.config.schema import BufferConfig, GenerationConfig, RunConfig
from rollart.config.tasks import EnvConfig


def test_the_written_file_loads_as_the_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "my.yaml"
    assert main(["init", str(path)]) == 0
    assert f"rollart train {path} --dry-run" in capsys.readouterr().out
    assert load_config(path) == load_config()
    assert main(["train", str(path), "--dry-run"]) == 0


def test_every_key_is_there_and_those_that_need_it_are_explained(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    main(["init", str(path)])
    text = path.read_text()
    for section in (Config, RunConfig, BufferConfig, GenerationConfig):
        for name in section.__struct_fields__:
            assert f"{name}:" in text
    assert "# Passes of a train step over its batch." in text
    assert "# FrozenLake on random maps." in text
    assert max(map(len, text.splitlines())) <= 118


def test_an_environment_becomes_the_task(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    assert main(["init", str(path), "--env", "gymnasium:Taxi-v4"]) == 0
    task = load_config(path).tasks["Taxi-v4"]
    assert isinstance(task, EnvConfig)
    assert task.env == "gymnasium:Taxi-v4"


@pytest.mark.parametrize("words", [["--env", "gymnasium:Nope-v0"], ["--env", "nonsense"]])
def test_an_unknown_environment_writes_nothing(tmp_path: Path, words: list[str]) -> None:
    path = tmp_path / "my.yaml"
    assert main(["init", str(path), *words]) == 2
    assert not path.exists()


def test_a_file_that_exists_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("mine")
    assert main(["init", str(path)]) == 2
    assert path.read_text() == "mine"
