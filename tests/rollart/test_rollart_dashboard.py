"""The live dashboard: what it shows where, and that it cannot end a run."""

from __future__ import annotations

import io
import logging
import subprocess
import sys

import msgspec
import pytest
from rich.console import Console

from rollart.observe import REQUIRED, Dashboard, Snapshot, snapshot

ROW = dict.fromkeys(REQUIRED, 0.5) | {
    "step": 30,
    "time": 60.0,
    "eval/success": 0.625,
    "tokens_per_s": 2140.0,
    "staleness/max": 1,
    "time/get_batch": 1.5,
    "time/train_step": 0.5,
    "pull_exposed_s": 0.031,
    "ledger/issued": 10,
    "ledger/running": 4,
    "ledger/buffered": 0,
    "ledger/delivered": 6,
    "ledger/surplus": 0,
    "ledger/stale": 0,
    "ledger/filtered": 0,
    "ledger/failed": 0,
    "ledger/cancelled": 0,
}


def terminal(width: int = 100) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=40, legacy_windows=False)


def written(console: Console) -> str:
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_a_row_becomes_a_snapshot():
    shot = snapshot(ROW, run="frozenlake", steps=120, bound=1)
    assert (shot.step, shot.eta, shot.success) == (30, 180.0, 0.625)
    assert shot.parts == {"get_batch": 1.5, "train_step": 0.5}
    assert shot.ledger["issued"] == 10
    without = {key: value for key, value in ROW.items() if key != "eval/success"}
    assert snapshot(without, run="a", success=0.5).success == 0.5


def test_a_terminal_shows_everything():
    console = terminal()
    with Dashboard(console) as dashboard:
        dashboard.update(snapshot(ROW, run="frozenlake", steps=120, bound=1, phase="train_step"))
    text = written(console)
    for shown in ("frozenlake", "30/120", "0.625", "2,140", "bound 1", "0.031", "1:00 elapsed", "3:00 to go"):
        assert shown in text
    for shown in ("get_batch 75%", "train_step 25%", "10 issued = 4 running + 6 delivered", "5.0e-01"):
        assert shown in text


@pytest.mark.parametrize("width", [24, 60, 200])
def test_it_fits_any_width_and_an_empty_snapshot(width: int):
    console = terminal(width)
    with Dashboard(console) as dashboard:
        dashboard.update(Snapshot(run="a"))
        dashboard.update(snapshot(ROW, run="[bold]hostile[/] \x1b[2J" * 9, steps=120))
    assert "iteration" in written(console)


def test_a_ledger_that_does_not_balance_stands_out():
    console = terminal()
    with Dashboard(console) as dashboard:
        dashboard.update(snapshot(ROW | {"ledger/issued": 11}, run="a"))
    assert "11 issued ≠" in written(console)


def test_without_a_terminal_each_iteration_is_one_line():
    console = Console(file=io.StringIO(), width=40)
    shot = snapshot(ROW, run="a", steps=120)
    with Dashboard(console) as dashboard:
        dashboard.update(Snapshot(run="a", phase="starting"))
        dashboard.update(shot)
        dashboard.update(msgspec.structs.replace(shot, phase="suspend"))
        dashboard.update(msgspec.structs.replace(shot, step=31))
        dashboard.log("saved checkpoint 31")
    lines = written(console).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("[30/120]  reward 0.500  success 0.625") and "ETA 3:00" in lines[0]
    assert lines[1].startswith("[31/120]") and lines[2] == "saved checkpoint 31"


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError("no space left on device")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_broken_console_never_ends_the_run(is_terminal: bool, caplog: pytest.LogCaptureFixture):
    console = Console(file=Full(), force_terminal=is_terminal, width=80)
    stdout = sys.stdout
    with caplog.at_level(logging.WARNING), Dashboard(console) as dashboard:
        for step in (1, 2):
            dashboard.update(snapshot(ROW | {"step": step}, run="a"))
        dashboard.log("still here")
        assert sys.stdout is stdout
    assert caplog.text.count("the dashboard is off") == 1


def test_a_closed_pipe_never_ends_the_run():
    script = """
import sys
from rollart.observe import Dashboard, Snapshot
sys.stdin.read()  # until the reader of our output is gone
with Dashboard() as dashboard:
    for step in range(1, 4):
        dashboard.update(Snapshot(run="a", step=step))
sys.stderr.write("trained")
"""
    child = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdin and child.stdout and child.stderr
    child.stdout.close()
    child.stdin.close()
    with child.stderr:
        errors = child.stderr.read().decode()
    assert child.wait() == 0
    assert errors.endswith("trained") and errors.count("the dashboard is off") == 1


def test_a_console_without_block_characters_never_ends_the_run():
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with Dashboard(Console(file=ascii_only, force_terminal=True, width=80)) as dashboard:
        dashboard.update(snapshot(ROW, run="a"))
