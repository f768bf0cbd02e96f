"""`rollart simulate` says how a simulation came out: its numbers, what failed, what never happened."""

from __future__ import annotations

import logging
import signal
from pathlib import Path

import pytest
import yaml

from rollart.cli.main import main
from rollart.observe.runinfo import read_run

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "simulate_small.yaml"


@pytest.fixture(autouse=True)
def quiet() -> None:
    for name in ("envmanager", "llmproxy"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def command(folder: Path, *words: str) -> list[str]:
    return ["simulate", str(EXAMPLE), f"run.folder={folder}", "run.iterations=1", *words]


def test_a_second_run_is_told_how_to_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(tmp_path)) == 0
    assert "H20 hours for 1,000 trajectories" in capsys.readouterr().out
    assert main(command(tmp_path)) == 2
    told = capsys.readouterr().err
    assert "--overwrite" in told and "--resume" not in told


def test_what_cannot_be_simulated_leaves_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(tmp_path, "simulate.model=qwen3-235b-a22b")) == 2
    assert "raise tensor_parallel" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_what_ends_a_simulation_early_is_told_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storm = yaml.safe_dump([{"kind": "environments", "at": 1, "factor": 1, "for_s": 1e9}], default_flow_style=True)
    assert main(command(tmp_path, f"simulate.faults={storm}")) == 1
    told = capsys.readouterr().out
    assert "the simulation failed: BackendDown" in told and "Traceback" not in told
    info = read_run(tmp_path / "simulate_small")
    assert info is not None and info.status == "failed"
    assert "Traceback" in (tmp_path / "simulate_small" / "logs" / "driver.log").read_text()


def test_an_interrupted_simulation_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C cancels the run, which then ends as asyncio has it."""

    async def happen(world: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("rollart.simulate.run.happen", happen)
    assert main(command(tmp_path)) == 130
    assert "interrupted" in capsys.readouterr().out
    info = read_run(tmp_path / "simulate_small")
    assert info is not None and info.status == "interrupted"


def test_a_fault_after_the_end_is_said_never_to_have_happened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(tmp_path, "simulate.faults=[{kind: node, at: 1000000}]")) == 0
    assert "never happened: the fault node at 1e+06 s" in capsys.readouterr().out
