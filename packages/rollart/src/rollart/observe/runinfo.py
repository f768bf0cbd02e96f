"""run.json: what a run is and how it stands.

Invariants (tests/rollart/test_rollart_observe.py): it is replaced as a whole, so it is always readable
(`test_run_info_survives_a_round_trip_and_is_replaced_whole`); a run whose process is gone is never read as running
(`test_a_killed_run_is_read_as_killed`).
"""

from __future__ import annotations

import errno
import fcntl
from datetime import datetime
from pathlib import Path
from typing import Literal

import msgspec

from rollart.observe.errors import CorruptFile
from rollart.observe.files import replace_file

Status = Literal["running", "finished", "interrupted", "failed", "killed"]


LOCK = ".lock"
# Characters of a reason with which a description surely fits into one block.
_SHORT = 500


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
    cores: int | None = None  # that all its processes share
    peak_memory_bytes: int | None = None  # of all processes of the run together
    reason: str = ""  # why it failed or was interrupted


def write_run(folder: Path | str, info: RunInfo) -> None:
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path, content = folder / "run.json", msgspec.json.format(msgspec.json.encode(info)) + b"\n"
    try:
        replace_file(path, content)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not path.exists():
            raise
        _write_over(path, info)


def _write_over(path: Path, info: RunInfo) -> None:
    """On a full disk the file still has the block that it takes: how the run ended is not lost."""
    with path.open("r+b") as file:
        short = msgspec.structs.replace(info, reason=info.reason[:_SHORT])
        file.write(msgspec.json.format(msgspec.json.encode(short)) + b"\n")
        file.truncate()


def read_run(folder: Path | str) -> RunInfo | None:
    """None when the folder has no run.json."""
    path = Path(folder) / "run.json"
    if not path.exists():
        return None
    try:
        info = msgspec.json.decode(path.read_bytes(), type=RunInfo)
    except msgspec.DecodeError as error:
        raise CorruptFile(f"{path} is not a run's description ({error}); restore or remove it") from error
    if info.status == "running" and _abandoned(path.with_name(LOCK)):
        return msgspec.structs.replace(info, status="killed", reason="its process is gone; rollart resume goes on")
    return info


def _abandoned(lock: Path) -> bool:
    """True when nobody holds the lock of the run's folder, which its process keeps for as long as it lives."""
    if not lock.exists():
        return False
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
