"""metrics.jsonl: required keys, crashes at any byte, resumption, TensorBoard."""

from __future__ import annotations

import errno
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.errors import RunExists
from rollart.observe import (
    REQUIRED,
    CorruptFile,
    InvalidMetric,
    MetricsWriter,
    MissingMetric,
    histogram,
    read_metrics,
)


def a_row(step: int, **more: object) -> dict[str, object]:
    return dict.fromkeys(REQUIRED, 0.5) | {"step": step, "time/train": 1.0, "time/other": 0.25} | more


def write(folder: Path, *steps: int, resume: int | None = None) -> None:
    with MetricsWriter(folder, resume_step=resume, tensorboard=False) as writer:
        for step in steps:
            writer.write(a_row(step))


def test_rows_come_back_in_order(tmp_path: Path):
    write(tmp_path, 1, 2, 3)
    assert read_metrics(tmp_path) == [a_row(1), a_row(2), a_row(3)]


def test_a_run_without_rows_reads_as_empty(tmp_path: Path):
    assert read_metrics(tmp_path) == []
    write(tmp_path / "new")
    assert read_metrics(tmp_path / "new") == []


def test_a_row_is_on_disk_when_write_returns(tmp_path: Path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(a_row(1))
        assert len(read_metrics(tmp_path)) == 1


@pytest.mark.parametrize("key", [*REQUIRED, "time/"])
def test_a_row_without_a_required_key_is_refused(tmp_path: Path, key: str):
    row = {name: value for name, value in a_row(1).items() if not name.startswith(key)}
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        with pytest.raises(MissingMetric, match=key):
            writer.write(row)
        assert read_metrics(tmp_path) == []
        writer.write(a_row(1))


def test_values_are_numbers_or_null(tmp_path: Path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(a_row(1, a=np.float32(0.5), b=np.int64(7), c=math.nan, d=math.inf, e=None))
        for bad in ("fast", [1.0], 1j):
            with pytest.raises(InvalidMetric, match="policy/loss"):
                writer.write(a_row(2, **{"policy/loss": bad}))
    text = (tmp_path / "metrics.jsonl").read_text()
    row = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert [row[key] for key in "abcde"] == [0.5, 7, None, None, None]


@pytest.mark.parametrize("step", [3, 2, 0, -1, 4.0, None])
def test_steps_only_grow(tmp_path: Path, step: object):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(a_row(3))
        with pytest.raises(InvalidMetric, match="step"):
            writer.write(a_row(4) | {"step": step})


@settings(max_examples=40)
@given(st.data())
def test_a_file_cut_at_any_byte_reads_as_its_whole_rows(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("run")
    write(folder, 1, 2, 3)
    path = folder / "metrics.jsonl"
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    kept = whole[:cut].count(b"\n")
    assert read_metrics(folder) == [a_row(step) for step in range(1, kept + 1)]
    write(folder, *range(kept + 1, 4), resume=kept)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("checkpoint", [0, 1, 3, 5])
def test_resuming_cuts_the_rows_past_the_checkpoint(tmp_path: Path, checkpoint: int):
    write(tmp_path / "whole", 1, 2, 3, 4, 5, 6)
    write(tmp_path / "killed", 1, 2, 3, 4, 5)
    write(tmp_path / "killed", *range(checkpoint + 1, 7), resume=checkpoint)
    assert read_metrics(tmp_path / "killed") == read_metrics(tmp_path / "whole")


def test_a_new_run_does_not_touch_the_rows_of_another(tmp_path: Path):
    write(tmp_path, 1)
    with pytest.raises(RunExists, match="1 rows"):
        MetricsWriter(tmp_path, tensorboard=False)
    assert len(read_metrics(tmp_path)) == 1


@pytest.mark.parametrize("line", ["{", "[1]", '{"step": 1, "a": "b"}', '{"a": 1}', ""])
def test_damage_before_the_last_line_names_the_line(tmp_path: Path, line: str):
    write(tmp_path, 1)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(CorruptFile, match=r"metrics\.jsonl:2"):
        read_metrics(tmp_path)


def events_of(path: Path) -> list[Any]:
    """The events of a file: each is its length, a checksum, its bytes, a checksum."""
    from tensorboardX.proto.event_pb2 import Event

    content, found = path.read_bytes(), []
    while content:
        size = int.from_bytes(content[:8], "little")
        found.append(Event.FromString(content[12 : 12 + size]))
        content = content[16 + size :]
    return found


def test_tensorboard_gets_the_same_numbers(tmp_path: Path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(a_row(1, **{"reward/mean": 0.25, "eval/success": None}))
        [path] = (tmp_path / "tensorboard").iterdir()
        row = events_of(path)[-1]
        shown = {value.tag: value.simple_value for value in row.summary.value}
    assert row.step == 1
    assert shown == {key: value for key, value in a_row(1, **{"reward/mean": 0.25}).items() if key != "step"}
    path.rename(path.with_name("events.earlier"))
    with MetricsWriter(tmp_path, resume_step=1):
        pass
    [path] = (path for path in path.parent.iterdir() if path.name != "events.earlier")
    hidden = events_of(path)[-1]
    assert (hidden.step, hidden.session_log.status) == (2, hidden.session_log.START)


def test_a_full_disk_under_tensorboard_is_told_and_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from tensorboardX.event_file_writer import EventsWriter

    def full(writer: object, event: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with MetricsWriter(tmp_path) as writer:
        monkeypatch.setattr(EventsWriter, "write_event", full)
        with pytest.raises(OSError, match="No space left"):
            writer.write(a_row(1))
    assert len(read_metrics(tmp_path)) == 1


@given(st.lists(st.integers(0, 9), max_size=50))
def test_a_histogram_keeps_every_value(values):
    row = histogram("staleness", values)
    counts = {key: n for key, n in row.items() if "/hist/" in key}
    assert counts == {f"staleness/hist/{v}": values.count(v) for v in set(values)}
    assert row["staleness/max"] == max(values, default=None)
    assert row["staleness/mean"] == (pytest.approx(sum(values) / len(values)) if values else None)
