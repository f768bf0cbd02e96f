"""Step time and run.json."""

from __future__ import annotations

import asyncio
import errno
import fcntl
from datetime import UTC, datetime
from pathlib import Path

import async_solipsism
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.observe import ClockMisuse, CorruptFile, RunInfo, StepClock, read_run, write_run
from rollart.observe.files import replace_file


class Hand:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 12345.678

    def __call__(self) -> float:
        return self.now


_parts = st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 100), st.floats(0, 100), st.booleans()), max_size=8)


@given(st.lists(_parts, min_size=1, max_size=4))
def test_parts_sum_to_wall_time_and_iterations_tile_the_run(iterations):
    hand = Hand()
    clock = StepClock(hand)
    began = last = hand.now
    total = 0
    for parts in iterations:
        for name, outside, inside, nested in parts:
            hand.now += outside
            with clock.part(name):
                hand.now += inside
                if nested:
                    with clock.part("nested"):
                        hand.now += inside
        step = clock.lap()
        assert step.start == pytest.approx(last, abs=2e-9)
        assert step.wall_ns == sum(step.parts_ns.values())
        assert abs(step.wall_ns - round(step.end * 1e9) + round(step.start * 1e9)) <= 1
        last, total = step.end, total + step.wall_ns
    assert total == round(hand.now * 1e9) - round(began * 1e9)


def test_time_belongs_to_the_innermost_part_and_the_rest_is_other():
    hand = Hand()
    clock = StepClock(hand)
    hand.now += 1
    with clock.part("train"):
        hand.now += 2
        with clock.part("push"):
            hand.now += 4
        hand.now += 8
    step = clock.lap()
    assert step.metrics() == {"time/other": 1.0, "time/train": 10.0, "time/push": 4.0}
    assert clock.lap().parts == {"other": 0.0}


def test_a_part_that_raises_is_still_charged():
    hand = Hand()
    clock = StepClock(hand)
    with pytest.raises(KeyError), clock.part("train"):
        hand.now += 3
        raise KeyError
    assert clock.lap().parts["train"] == 3.0


def test_overlapping_parts_and_a_lap_inside_a_part_are_refused():
    clock = StepClock(Hand())
    first, second = clock.part("first"), clock.part("second")
    first.__enter__()
    with pytest.raises(ClockMisuse, match="first"):
        clock.lap()
    second.__enter__()
    with pytest.raises(ClockMisuse, match="second"):
        first.__exit__(None, None, None)


def test_it_runs_on_virtual_time():
    async def iteration() -> dict[str, float]:
        clock = StepClock(asyncio.get_running_loop().time)
        with clock.part("get_batch"):
            await asyncio.sleep(3600)
        await asyncio.sleep(1)
        return clock.lap().parts

    with asyncio.Runner(loop_factory=async_solipsism.EventLoop) as runner:
        parts = runner.run(iteration())
    assert parts == pytest.approx({"get_batch": 3600, "other": 1})


def test_run_info_survives_a_round_trip_and_is_replaced_whole(tmp_path: Path):
    folder = tmp_path / "runs" / "a"
    assert read_run(folder) is None
    info = RunInfo(name="a", seed=3, started=datetime(2030, 1, 2, tzinfo=UTC), peak_memory_bytes=1 << 33)
    write_run(folder, info)
    done = msgspec.structs.replace(info, status="finished", wall_s=61.5)
    write_run(folder, done)
    assert read_run(folder) == done
    assert [path.name for path in folder.iterdir()] == ["run.json"]


def test_a_damaged_run_info_names_the_file(tmp_path: Path):
    (tmp_path / "run.json").write_text('{"name": "a", "status": "lost"}')
    with pytest.raises(CorruptFile, match=r"run\.json.*lost"):
        read_run(tmp_path)


def test_a_killed_run_is_read_as_killed(tmp_path: Path) -> None:
    write_run(tmp_path, RunInfo(name="a"))
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        held = read_run(tmp_path)
        assert held is not None
        assert held.status == "running"
    gone = read_run(tmp_path)
    assert gone is not None
    assert (gone.status, "rollart resume" in gone.reason) == ("killed", True)


def test_how_a_run_ended_is_written_on_a_full_disk_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there is written over: a file keeps the block that it has."""
    write_run(tmp_path, RunInfo(name="a", status="running"))

    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("rollart.observe.runinfo.replace_file", full)
    write_run(tmp_path, RunInfo(name="a", status="failed", reason="x" * 10_000))
    info = read_run(tmp_path)
    assert info is not None and info.status == "failed" and info.reason == "x" * 500
    with pytest.raises(OSError, match="No space"):
        write_run(tmp_path / "other", info)


def test_a_replacement_that_fails_leaves_no_draft(tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    with pytest.raises(IsADirectoryError):
        replace_file(tmp_path / "place", b"x")
    assert [entry.name for entry in tmp_path.iterdir()] == ["place"]
