"""metrics.jsonl: one JSON object per iteration, and the same numbers for TensorBoard.

Invariants (tests/rollart/test_rollart_metrics.py):
- Every row has every required key (`test_a_row_without_a_required_key_is_refused`), steps only grow.
- Killed at any byte, the file reads as the rows that were written whole
  (`test_a_file_cut_at_any_byte_reads_as_its_whole_rows`).
- A resumed run's file equals that of a run that was never interrupted
  (`test_resuming_cuts_the_rows_past_the_checkpoint`).

A row describes one iteration. `step` counts finished iterations, so the first row has step 1; `time` is
run time in seconds at the end of the iteration; `eval/success` was measured after the iteration and
`eval/success_before` (first row only) before any training. A number that was not measured, or is not
finite, is null.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from rollart.errors import RunExists
from rollart.observe.errors import CorruptFile, InvalidMetric, MissingMetric
from rollart.observe.files import replace_file

Row = dict[str, int | float | None]

LEDGER_ENDS = ("delivered", "surplus", "stale", "filtered", "failed", "cancelled")
"""The columns of trajectories that have ended."""
LEDGER_COLUMNS = ("issued", "running", "buffered", *LEDGER_ENDS)
REQUIRED = (
    "step",
    "version",
    "time",
    "reward/mean",
    "parity/max_abs",
    "staleness/mean",
    "staleness/max",
    "off_policy/in_flight",
    "off_policy/in_queue",
    "tokens_per_s",
    "push_s",
    "pull_accumulated_s",
    "pull_exposed_s",
    *(f"ledger/{column}" for column in LEDGER_COLUMNS),
)


class MetricsWriter:
    """Appends rows to `folder/metrics.jsonl` and to `folder/tensorboard`.

    Without `resume_step` the run is new and the folder must hold no rows. With it, the rows past that
    step are cut first: the iterations after the checkpoint are run again.
    """

    def __init__(self, folder: Path | str, *, resume_step: int | None = None, tensorboard: bool = True) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        rows = read_metrics(folder)
        if rows and resume_step is None:
            raise RunExists(f"{path} holds {len(rows)} rows; resume from a step or choose another folder")
        kept = [row for row in rows if _step(row) <= (resume_step or 0)]
        replace_file(path, b"".join(msgspec.json.encode(row) + b"\n" for row in kept))
        self._last = _step(kept[-1]) if kept else None
        self._file = path.open("ab")
        self._board = _Board(folder / "tensorboard", self._last) if tensorboard else None

    def write(self, row: Mapping[str, object]) -> Row:
        """Append one iteration; the row as written is returned. Nothing is written when it is refused."""
        plain: Row = {key: _number(key, value) for key, value in row.items()}
        missing = [key for key in REQUIRED if key not in plain]
        if not any(key.startswith("time/") for key in plain):
            missing.append("time/<part>")
        if missing:
            raise MissingMetric(f"row of step {plain.get('step')} lacks {', '.join(missing)}")
        step = plain["step"]
        if not isinstance(step, int) or step < 1 or (self._last is not None and step <= self._last):
            raise InvalidMetric(f"step is {step!r}; the next row's must be an integer above {self._last or 0}")
        self._file.write(msgspec.json.encode(plain) + b"\n")
        self._file.flush()
        self._last = step
        if self._board is not None:
            self._board.write(step, plain)
        return plain

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(folder: Path | str) -> list[Row]:
    """The rows of a run, oldest first; none if it has not finished an iteration.

    A last line that a kill left unfinished is ignored.
    """
    path = Path(folder) / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
    # What follows the last newline is empty, or torn.
    return [_decode(path, number, line) for number, line in enumerate(lines[:-1], 1)]


def wall_seconds(row: Row) -> float:
    """Of an iteration: its parts sum to it."""
    return sum(value or 0.0 for key, value in row.items() if key.startswith("time/"))


def histogram(prefix: str, values: Iterable[int]) -> Row:
    """`prefix/mean`, `prefix/max` and `prefix/hist/<value>` counts of a batch, ready for a row."""
    counts = Counter(values)
    total = counts.total()
    row: Row = {
        f"{prefix}/mean": sum(value * n for value, n in counts.items()) / total if total else None,
        f"{prefix}/max": max(counts, default=None),
    }
    return row | {f"{prefix}/hist/{value}": counts[value] for value in sorted(counts)}


def _decode(path: Path, number: int, line: bytes) -> Row:
    try:
        row = msgspec.json.decode(line, type=Row)
    except msgspec.DecodeError as error:
        raise CorruptFile(f"{path}:{number} is not a row of numbers ({error}); remove the line") from error
    if not isinstance(row.get("step"), int):
        raise CorruptFile(f"{path}:{number} has no step; remove the line")
    return row


def _step(row: Row) -> int:
    step = row["step"]
    assert isinstance(step, int)
    return step


def _number(key: str, value: object) -> int | float | None:
    if value is None:
        return None
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    raise InvalidMetric(f"{key} is {value!r} ({type(value).__name__}); it must be a number or None")


class _Board:
    """TensorBoard's event file, written here and now.

    tensorboardX's own writer does it in a thread behind a queue: that thread dies of a full disk, and then the queue
    holds the run up for ever.
    """

    def __init__(self, folder: Path, last: int | None) -> None:
        """What an earlier attempt logged past row `last` is hidden."""
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        folder.mkdir(parents=True, exist_ok=True)
        self._events = EventsWriter(str(folder / "events"))
        self._event: Any = Event
        if last is not None:
            self._events.write_event(Event(step=last + 1, session_log=SessionLog(status=SessionLog.START)))
            self._events.flush()

    def write(self, step: int, row: Row) -> None:
        from tensorboardX.summary import scalar

        event = self._event(step=step, wall_time=time.time())
        for name, value in row.items():
            if value is not None and name != "step":
                event.summary.value.extend(scalar(name, value).value)
        self._events.write_event(event)
        self._events.flush()

    def close(self) -> None:
        self._events.close()
