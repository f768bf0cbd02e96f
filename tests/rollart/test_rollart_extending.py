"""The programs of docs/extending.md run as they are pasted."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.seconds

MANUAL = Path(__file__).parents[2] / "docs" / "extending.md"


@pytest.fixture
def pasted(tmp_path: Path) -> Path:
    """A folder with every block that begins with the name of its file."""
    for name, block in re.findall(r"```python\n# (\w+\.py)(.*?)```", MANUAL.read_text(), re.DOTALL):
        (tmp_path / name).write_text(f"#{block}")
    return tmp_path


def said(folder: Path, *words: str) -> str:
    """What a command prints in the folder."""
    return subprocess.run(words, cwd=folder, check=True, capture_output=True, text=True, timeout=250).stdout


def test_the_environment_keeps_the_contract_and_makes_a_configuration(pasted: Path) -> None:
    scripts = Path(sys.executable).parent
    assert "FAIL" not in said(pasted, str(scripts / "envmanager"), "check", "maze:Maze")
    said(pasted, str(scripts / "rollart"), "init", "maze.yaml", "--env", "maze:Maze")
    plan = said(pasted, str(scripts / "rollart"), "train", "maze.yaml", "tasks.Maze.reward=reward:quick", "--dry-run")
    assert "Maze: maze:Maze" in plan


OWN = ("run.name=own", 'tasks={Sums: {kind: "sums:Sums", largest: 4}}', "train.objective.loss=plain:reinforce")


def test_the_task_and_the_loss_are_planned(pasted: Path) -> None:
    rollart = str(Path(sys.executable).parent / "rollart")
    said(pasted, rollart, "init", "maze.yaml", "--env", "maze:Maze")
    plan = said(pasted, rollart, "train", "maze.yaml", *OWN, "--dry-run")
    assert "Sums: sums:Sums" in plan
    assert "loss plain:reinforce" in plan


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(600)
def test_the_task_and_the_loss_train_and_go_on(pasted: Path) -> None:
    """In other processes, and from the configuration that the run folder holds."""
    rollart = str(Path(sys.executable).parent / "rollart")
    said(pasted, rollart, "init", "maze.yaml", "--env", "maze:Maze")
    few = ("buffer.batch_groups=4", "eval.episodes=8", "run.iterations=1")
    assert "finished" in said(pasted, rollart, "train", "maze.yaml", *OWN, *few)
    assert "finished" in said(pasted, rollart, "resume", "runs/own", "run.iterations=2")


def test_the_worker_serves_what_it_was_updated_to(pasted: Path) -> None:
    assert "token_ids=[1, 2], logprobs=[0.0, 0.0], spans=[Span(version=1, start=0, end=2)]" in said(
        pasted, sys.executable, "echo.py"
    )


@pytest.mark.real
def test_the_role_scores(pasted: Path) -> None:
    assert said(pasted, sys.executable, "role.py") == "[1.0, 2.0, 3.0]\n"
