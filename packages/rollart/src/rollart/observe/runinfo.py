"""run.json: what a run is and how it stands. Replaced as a whole, so it is always readable
(tests/rollart/test_rollart_observe.py::test_run_info_survives_a_round_trip_and_is_replaced_whole)."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Literal

import msgspec

from rollart.observe.errors import CorruptFile
from rollart.observe.files import replace_file

Status = Literal["running", "finished", "interrupted", "failed"]


class RunInfo(msgspec.Struct, kw_only=True):
    name: str
    status: Status = "running"
    mode: str = "rollart"
    seed: int = 0
    iterations: int | None = None  # how many were asked for
    alpha: float | None = None
    parity_limit: float | None = None
    started: datetime | None = None
    ended: datetime | None = None
    wall_s: float | None = None  # time spent running, without the gaps between an interruption and its resume
    peak_memory_bytes: int | None = None  # of all processes of the run together
    reason: str = ""  # why it failed or was interrupted


def write_run(folder: Path | str, info: RunInfo) -> None:
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / "run.json", msgspec.json.format(msgspec.json.encode(info)) + b"\n")


def read_run(folder: Path | str) -> RunInfo | None:
    """None when the folder has no run.json."""
    path = Path(folder) / "run.json"
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunInfo)
    except msgspec.DecodeError as error:
        raise CorruptFile(f"{path} is not a run's description ({error}); restore or remove it") from error
