"""A run folder is never overwritten unasked and never shared by two runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rollart.config import Config, load_config
from rollart.errors import ConfigError, RunExists, RunMissing
from rollart.runtime.checkpoint import RunState
from rollart.runtime.folder import RunFolder


def configured(folder: Path, *overrides: str) -> Config:
    return load_config(overrides=[f"run.folder={folder}", "run.name=a", *overrides])


async def no_trainer(folder: Path) -> None:
    pass


def test_a_run_is_not_overwritten_unasked(tmp_path: Path) -> None:
    config = configured(tmp_path)
    folder = RunFolder.of(config)
    folder.create(config)
    (folder.path / "metrics.jsonl").write_text("{}\n")
    folder.close()
    with pytest.raises(RunExists, match=r"--resume.*--overwrite"):
        RunFolder.of(config).create(config)
    assert (folder.path / "metrics.jsonl").exists()
    again = RunFolder.of(config)
    again.create(config, overwrite=True)
    assert not (folder.path / "metrics.jsonl").exists()
    assert again.stored_config() == config
    again.close()


def test_what_is_no_run_is_never_removed(tmp_path: Path) -> None:
    config = configured(tmp_path)
    thesis = tmp_path / "a" / "docs" / "thesis.txt"
    thesis.parent.mkdir(parents=True)
    thesis.write_text("ten years")
    for overwrite in (False, True):
        with pytest.raises(RunExists, match="no run's"):
            RunFolder.of(config).create(config, overwrite=overwrite)
    assert thesis.read_text() == "ten years"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = configured(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"run\.folder.*choose another"):
        RunFolder.of(config).create(config)


async def test_reopening_needs_a_checkpoint_and_a_fitting_configuration(tmp_path: Path) -> None:
    config = configured(tmp_path)
    folder = RunFolder.of(config)
    with pytest.raises(RunMissing, match="no run"):
        folder.reopen(config)
    folder.create(config)
    with pytest.raises(RunMissing, match="no checkpoint"):
        folder.reopen(config)
    await folder.checkpoints.write(RunState(step=1, trainer_version=1, elapsed_s=0, buffer=b""), no_trainer)
    folder.close()
    with pytest.raises(ConfigError, match=r"model\.hidden"):
        folder.reopen(configured(tmp_path, "model.hidden=128"))
    with pytest.raises(ConfigError, match=r"buffer\.alpha"):
        folder.reopen(configured(tmp_path, "buffer.alpha=2"))
    longer = configured(tmp_path, "run.iterations=500")
    folder.reopen(longer)
    assert folder.stored_config().run.iterations == 500
    folder.close()


HOLD = """
import sys
from rollart.config import load_config
from rollart.runtime.folder import RunFolder
config = load_config(overrides=sys.argv[1:])
folder = RunFolder.of(config)
folder.create(config)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.real
def test_a_folder_in_use_is_refused_until_its_holder_is_gone(tmp_path: Path) -> None:
    config = configured(tmp_path)
    command = [sys.executable, "-c", HOLD, f"run.folder={tmp_path}", "run.name=a"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunExists, match=f"in use by process {holder.pid}"):
            RunFolder.of(config).create(config, overwrite=True)
        holder.kill()
    folder = RunFolder.of(config)
    folder.create(config, overwrite=True)
    folder.close()
