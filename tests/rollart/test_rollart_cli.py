"""The command line: help, refusals with a remedy, and which run is meant."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from rollart.cli.main import main
from rollart.config import load_config
from rollart.errors import unwritable
from rollart.models import make_tiny_qwen3
from rollart.observe.runinfo import RunInfo, write_run
from rollart.runtime.folder import RunFolder


def prepared(tmp_path: Path, status: str) -> list[str]:
    """A run folder that holds a run; returns the words that name it."""
    tmp_path.mkdir(exist_ok=True)
    path = tmp_path / "c.yaml"
    path.write_text(f"run: {{name: a, folder: '{tmp_path}/runs', iterations: 5}}\n")
    config = load_config(path)
    folder = RunFolder.of(config)
    folder.create(config)
    write_run(folder.path, RunInfo(name="a", status=status, iterations=5))  # type: ignore[arg-type]
    folder.close()
    return ["train", str(path)]


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["report", "--help"], ["doctor", "--help"]])
def test_every_command_explains_itself(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 0
    assert "usage: rollart" in capsys.readouterr().out


def test_a_wrong_key_is_one_line_with_the_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*prepared(tmp_path, "running"), "train.lrr=3"]) == 2
    assert capsys.readouterr().err == "rollart: train.lrr = 3: unknown key; did you mean train.lr?\n"


def test_an_override_may_follow_an_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*prepared(tmp_path, "running"), "--dry-run", "run.seed=9"]) == 0
    assert "seed 9" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*prepared(tmp_path / "b", "running"), "--dry-rum"])


def test_an_existing_run_is_refused_with_the_three_ways_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(prepared(tmp_path, "interrupted")) == 2
    said = capsys.readouterr().err
    assert all(way in said for way in ("--resume", "--overwrite", "run.name="))


def test_a_resume_without_a_checkpoint_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*prepared(tmp_path, "failed"), "--resume"]) == 2
    assert "no checkpoint" in capsys.readouterr().err


def test_resuming_a_run_without_a_checkpoint_names_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared(tmp_path, "running")
    run = tmp_path / "runs" / "a"
    assert main(["resume", str(run)]) == 2
    assert capsys.readouterr().err == (
        f"rollart: {run} holds no checkpoint; start it anew: rollart train {run / 'config.yaml'} --overwrite\n"
    )


def test_a_full_disk_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "config.yaml"))

    monkeypatch.setattr(Path, "write_text", full)
    assert main(["init", str(tmp_path / "new.yaml")]) == 2
    assert "config.yaml cannot be written: No space left on device; see to room" in capsys.readouterr().err


def test_continue_says_that_a_finished_run_is_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*prepared(tmp_path, "finished"), "--continue"]) == 0
    said = capsys.readouterr().out
    assert "is done" in said
    assert "report.html" in said


def test_continue_does_not_take_another_runs_result_for_this_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*prepared(tmp_path, "finished"), "--continue", "buffer.alpha=0"]) == 2
    assert "is done, with another buffer.alpha" in capsys.readouterr().err


def test_a_resume_of_a_finished_run_says_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepared(tmp_path, "finished")
    run = str(tmp_path / "runs" / "a")
    assert main(["resume", run]) == 0
    assert "is done; go on with a larger run.iterations, e.g. 10" in capsys.readouterr().out
    # Asked for more, it looks for the checkpoint to go on from.
    for more in ("run.iterations=6", "run.stop_at_success=0.5"):
        assert main(["resume", run, more]) == 2
        assert "no checkpoint" in capsys.readouterr().err


def test_a_report_says_which_run_or_file_may_be_meant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").touch()
    assert main(["report", str(tmp_path)]) == 2
    assert f"did you mean {tmp_path / 'mine'}?" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "mine"), "--out", str(tmp_path)]) == 2
    assert "is a folder; name a file in it" in capsys.readouterr().err


def test_only_what_is_required_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train"])
    assert capsys.readouterr().err.endswith("required: config\n")


def test_a_report_of_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "nothing")]) == 2
    assert "holds no run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("env: nosuch", "tasks.a.env = 'nosuch': 'nosuch' names no environment; write gymnasium:ID"),
        ("env: 'gymnasium:NoSuch-v9'", "tasks.a.env = 'gymnasium:NoSuch-v9': "),
        ("env: 'gymnasium:Taxi-v4', reward: 'nowhere:score'", "tasks.a.reward = 'nowhere:score': "),
    ],
)
def test_a_task_that_cannot_be_made_leaves_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], task: str, said: str
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"run: {{folder: {tmp_path / 'runs'}}}\ntasks: {{a: {{kind: env, {task}}}}}\n")
    assert main(["train", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"rollart: {said}")
    assert not (tmp_path / "runs").exists()


def test_a_model_that_cannot_be_cut_leaves_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"run: {{folder: {tmp_path / 'runs'}}}\n")
    assert main(["train", str(path), "train.backend=megatron", "train.tensor_parallel=3"]) == 2
    assert capsys.readouterr().err == (
        "rollart: train.tensor_parallel = 3: does not divide the 4 attention heads; 2 works\n"
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.seconds
def test_a_closed_output_is_no_obstacle(tmp_path: Path) -> None:
    script = f'exec "{sys.executable}" -m rollart.cli.main train "{tmp_path / "none.yaml"}" >&-'
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "there is no such file" in ended.stderr


def test_what_a_full_disk_made_fail_first_is_what_counts(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    closing = RuntimeError("raised in close")
    closing.__context__ = full
    told = unwritable(closing, tmp_path)
    assert str(told).startswith(f"{tmp_path} cannot be written: No space left on device; see to room")
    assert unwritable(RuntimeError(), tmp_path) is None


@pytest.mark.parametrize(
    ("damage", "words", "said"),
    [
        (True, [], "its tokenizer cannot be loaded ("),
        (False, ["tasks={a: {kind: env, env: 'gymnasium:Taxi-v4', chat: llama3}}"], "chat: plain needs none"),
    ],
)
def test_a_tokenizer_that_cannot_speak_the_tasks_leaves_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: bool, words: list[str], said: str
) -> None:
    model = make_tiny_qwen3(tmp_path / "model", 0, vocabulary="bytes")
    if damage:
        (model / "tokenizer.json").write_text("{")
    path = tmp_path / "c.yaml"
    path.write_text(f"run: {{folder: {tmp_path / 'runs'}}}\nmodel: {{path: {model}}}\n")
    for more in ([], ["--dry-run"]):
        assert main(["train", str(path), *words, *more]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_an_evaluation_that_fails_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failing(*arguments: object) -> None:
        raise TimeoutError("no engine within 300 s")

    prepared(tmp_path, "finished")
    run = tmp_path / "runs" / "a"
    (run / "checkpoints" / "step-000001").mkdir(parents=True)
    monkeypatch.setattr("rollart.runtime.evaluation.success_of", failing)
    assert main(["eval", str(run)]) == 1
    said = capsys.readouterr()
    assert "the evaluation failed: TimeoutError: no engine within 300 s" in said.out
    assert "Traceback" not in said.out + said.err
    assert "Traceback" in (run / "logs" / "driver.log").read_text()


def test_a_folder_of_any_name_is_told_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*prepared(tmp_path / "a[red]", "finished"), "--continue"]) == 0
    assert "a[red]/runs/a is done" in capsys.readouterr().out
