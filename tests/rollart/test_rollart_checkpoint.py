"""Checkpoints are there whole or not at all, whenever the writer dies."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from envmanager import Outcome, Timings, Trajectory
from rollart.config import load_config
from rollart.errors import CheckpointError
from rollart.observe.dashboard import Dashboard
from rollart.observe.runinfo import read_run
from rollart.runtime.checkpoint import PAYLOADS, Checkpoints, RunState
from rollart.runtime.folder import RunFolder
from rollart.runtime.training import train
from samplebuffer import SampleBuffer

SIZES = {"weights/model.bin": 1000}


def state(step: int) -> RunState:
    return RunState(step=step, trainer_version=step, elapsed_s=1.5, buffer=b"buffer %d" % step)


def written(step: int) -> RunState:
    """As it is read back."""
    return msgspec.structs.replace(state(step), sizes=SIZES)


async def save(folder: Path) -> None:
    (folder / "weights").mkdir()
    (folder / "weights" / "model.bin").write_bytes(b"w" * 1000)


async def test_a_written_checkpoint_reads_back(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    assert checkpoints.latest() is None
    place = await checkpoints.write(state(3), save)
    assert checkpoints.latest() == place
    assert checkpoints.read(place) == written(3)
    assert (place / "weights" / "model.bin").stat().st_size == 1000


async def test_only_the_last_ones_are_kept_and_a_step_can_be_written_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 5, 10, 10):
        await checkpoints.write(state(step), save)
    assert checkpoints.steps() == [5, 10]
    assert checkpoints.read(tmp_path / "step-000010") == written(10)


async def test_a_failed_save_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    await checkpoints.write(state(1), save)

    async def fail(folder: Path) -> None:
        await save(folder)
        raise OSError("disk full")

    with pytest.raises(CheckpointError, match=r"step-000002 cannot be written: disk full; the last is .*step-000001"):
        await checkpoints.write(state(2), fail)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000001"]
    await checkpoints.write(state(3), save)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-000001", "step-000003"]


async def test_a_damaged_checkpoint_is_told_by_its_file(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    first, second = await checkpoints.write(state(1), save), await checkpoints.write(state(2), save)
    (second / "weights" / "model.bin").write_bytes(b"w" * 999)
    with pytest.raises(CheckpointError, match=r"bin has 999 bytes, not the 1000 written; remove .*step-000002"):
        checkpoints.read(second)
    (first / "weights" / "model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"model\.bin is not there.*no older one: start the run anew"):
        checkpoints.read(first)
    (second / "state.msgpack").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"state\.msgpack: .*remove .*step-000002 to resume"):
        checkpoints.read(second)
    (tmp_path / "step-000009").touch()
    assert checkpoints.steps() == [1, 2]


async def test_what_the_trainer_raises_passes_through(tmp_path: Path) -> None:
    async def fail(folder: Path) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await Checkpoints(tmp_path).write(state(1), fail)
    assert not list(tmp_path.iterdir())


def write_without_room(folder: str, limit: int) -> None:
    """A writer that may write files of `limit` bytes and no longer ones; its exit code is 7 for a CheckpointError."""
    import asyncio
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        asyncio.run(Checkpoints(Path(folder)).write(state(2), save))
    except CheckpointError:
        os._exit(7)


@pytest.mark.real
@pytest.mark.parametrize("limit", [0, 20, 999])  # no file at all, half the driver's state, most of the trainer's
async def test_a_full_disk_leaves_the_last_checkpoint(tmp_path: Path, limit: int) -> None:
    checkpoints = Checkpoints(tmp_path)
    await checkpoints.write(state(1), save)
    writer = multiprocessing.get_context("fork").Process(target=write_without_room, args=(str(tmp_path), limit))
    writer.start()
    writer.join()
    assert writer.exitcode == 7
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000001"]
    assert checkpoints.read(tmp_path / "step-000001") == written(1)
    await checkpoints.write(state(2), save)
    assert checkpoints.steps() == [1, 2]


def die_while_writing(folder: str, at: str) -> None:
    """A writer that is killed at a chosen system call."""
    import asyncio

    real = getattr(os, at)

    def killed(*arguments, **named):
        os.kill(os.getpid(), 9)
        return real(*arguments, **named)

    async def write() -> None:
        async def save_then_arm(staging: Path) -> None:
            await save(staging)
            setattr(os, at, killed)

        await Checkpoints(Path(folder)).write(state(2), save_then_arm)

    asyncio.run(write())


@pytest.mark.real
@pytest.mark.parametrize("at", ["fsync", "rename"])
async def test_a_killed_writer_leaves_the_last_checkpoint(tmp_path: Path, at: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    await checkpoints.write(state(1), save)
    writer = multiprocessing.get_context("fork").Process(target=die_while_writing, args=(str(tmp_path), at))
    writer.start()
    writer.join()
    assert writer.exitcode == -9
    latest = checkpoints.latest()
    assert latest is not None
    assert checkpoints.read(latest) == written(1)
    await checkpoints.write(state(3), save)
    assert checkpoints.steps() == [1, 3]


@pytest.mark.parametrize("content", [b"", b"\xc1", b"torn"])
async def test_a_damaged_state_is_named_with_its_remedy(tmp_path: Path, content: bytes) -> None:
    checkpoints = Checkpoints(tmp_path)
    place = await checkpoints.write(state(1), save)
    (place / "state.msgpack").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"state\.msgpack.*start the run anew"):
        checkpoints.read(place)


async def test_another_format_is_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    newer = RunState(format=99, step=1, trainer_version=1, elapsed_s=0.0, buffer=b"")
    place = await checkpoints.write(newer, save)
    with pytest.raises(CheckpointError, match="format 99"):
        checkpoints.read(place)


def buffer(payload: object) -> bytes:
    """The state of a buffer that holds one finished trajectory."""
    held = SampleBuffer(iter(["a", "b"]), batch_groups=1, group_size=2, alpha=0)
    ticket = held.next_ticket_nowait()
    assert ticket is not None
    ticket.stamp(0)
    ticket.finish(payload, 1.0)
    return msgspec.msgpack.encode(held.state_dict(PAYLOADS))


PLAYED = Trajectory(
    id="t",
    key="a",
    seed=0,
    task="x",
    turns=[],
    reward=1.0,
    outcome=Outcome("terminated", 0),
    timings=Timings(started=0, reset_s=0, ended=1),
)
DAMAGE = {
    "nothing": b"",
    "cut off": buffer(PLAYED)[:-9],
    "a word": msgspec.msgpack.encode("hello"),
    "a buffer of something else": buffer({"turns": "many"}),
    "a ledger that does not balance": msgspec.msgpack.encode(msgspec.msgpack.decode(buffer(PLAYED)) | {"issued": 9}),
}


@pytest.mark.parametrize("damage", DAMAGE)
async def test_a_damaged_buffer_in_a_whole_state_is_told_by_its_file(tmp_path: Path, damage: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step, content in ((1, buffer(PLAYED)), (2, DAMAGE[damage])):
        place = await checkpoints.write(msgspec.structs.replace(state(step), buffer=content), save)
    older = tmp_path / "step-000001"
    checkpoints.check_buffer(older, checkpoints.read(older))
    with pytest.raises(CheckpointError, match=r"state\.msgpack: the sample buffer: .*; remove .*step-000002"):
        checkpoints.check_buffer(place, checkpoints.read(place))


async def test_a_damaged_buffer_ends_a_resume_before_anything_starts(tmp_path: Path) -> None:
    config = load_config(overrides=[f"run.folder={tmp_path}"])
    folder = RunFolder.of(config)
    folder.create(config)
    await folder.checkpoints.write(state(1), save)
    with pytest.raises(CheckpointError, match="the sample buffer"):
        await train(config, folder, Dashboard(Console(quiet=True)), resume=True)
    folder.close()
    info = read_run(folder.path)
    assert info is not None
    assert info.status == "failed"
    assert "start the run anew with --overwrite" in info.reason
