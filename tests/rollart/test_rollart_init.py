"""`rollart init` writes every key, explained, and the file loads as the defaults under its own name."""

from __future__ import annotations

import re
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
    assert load_config(path) == load_config(overrides=["run.name=my"])
    assert main(["train", str(path), "--dry-run"]) == 0


@pytest.mark.parametrize("words", [[], ["--env", "gymnasium:Taxi-v4"]])
def test_every_key_is_explained(tmp_path: Path, words: list[str]) -> None:
    path = tmp_path / "my.yaml"
    main(["init", str(path), *words])
    lines = path.read_text().splitlines()
    keys = [n for n, line in enumerate(lines) if re.match(r" *[a-z_0-9]+:( |$)", line)]
    bare = {lines[n].split(":")[0].strip() for n in keys if "#" not in lines[n - 1]}
    # Explained by what stands above them; the pools and the tasks by their entries.
    assert bare <= {"tasks", "kind", "hidden", "layers", "heads", "beta2", "eps", "weight_decay", "hardware", "total"}


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


def test_a_conversation_gets_room_for_all_its_turns_and_trains_before_it_succeeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my.yaml"
    main(["init", str(path), "--env", "shop:all"])
    config = load_config(path)
    task = config.tasks["all"]
    assert isinstance(task, EnvConfig)
    assert task.max_turns * task.max_tokens < config.generation.max_model_len
    assert not config.buffer.drop_uniform


@pytest.mark.parametrize(("file", "name"), [("my.yaml", "my"), ("_a b.yaml", "a-b"), ("_.yaml", "run")])
def test_the_run_is_called_after_the_file(tmp_path: Path, file: str, name: str) -> None:
    main(["init", str(tmp_path / file)])
    assert load_config(tmp_path / file).run.name == name


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


def test_a_server_of_environments_becomes_the_task(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    assert main(["init", str(path), "--env", "http://127.0.0.1:9/x"]) == 0
    (task,) = load_config(path).tasks.values()
    assert isinstance(task, EnvConfig)
    assert task.env == "http://127.0.0.1:9/x"


@pytest.mark.parametrize("place", ["/proc/nowhere.yaml", "file/my.yaml"])
def test_a_file_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert main(["init", place]) == 2
    assert f"config = '{place}': cannot be written" in capsys.readouterr().err


def test_the_hint_can_be_pasted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "my own.yaml"
    assert main(["init", str(path)]) == 0
    assert f"rollart train '{path}' --dry-run" in capsys.readouterr().out
