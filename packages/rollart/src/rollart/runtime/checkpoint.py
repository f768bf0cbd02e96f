"""Checkpoints: everything a killed run needs to go on with the bound intact and no task skipped or repeated.

A checkpoint is a folder `step-NNNNNN`. It is written beside its place, synced, and renamed, so it is there
whole or not at all, also when the disk is full; a folder that a killed writer left is removed by the next one. The
last `keep` are kept. Held by tests/rollart/test_rollart_checkpoint.py.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from envmanager import Trajectory
from rollart.distributed.errors import RemoteError
from rollart.errors import CheckpointError
from samplebuffer import InvalidState, MsgpackCodec, SampleBuffer

FORMAT = 1
PAYLOADS = MsgpackCodec(Trajectory)
"""How the sample buffer's trajectories are written."""
_STATE = "state.msgpack"
_NAME = re.compile(r"^step-(\d{6,})$")


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """What the driver itself must remember. The trainer saves its own files into the same folder."""

    format: int = FORMAT
    step: int
    """Iterations completed."""
    trainer_version: int
    """Version of the weights in this checkpoint; generation serves it after a resume."""
    elapsed_s: float
    buffer: bytes
    """The sample buffer's encoded state: unfinished keys, finished members, the task cursor, the ledger."""
    sizes: dict[str, int] = {}
    """Bytes of each file of the trainer's, so that one that was cut off is found before anything starts."""


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder = folder
        self.keep = keep

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        names = (_NAME.match(entry.name) for entry in self.folder.iterdir() if entry.is_dir())
        return sorted(int(match[1]) for match in names if match)

    def latest(self) -> Path | None:
        """The newest complete checkpoint, or None."""
        steps = self.steps()
        return self._place(steps[-1]) if steps else None

    async def write(self, state: RunState, save_trainer: Callable[[Path], Awaitable[None]]) -> Path:
        """Write a checkpoint; `save_trainer(folder)` puts the trainer's files into it. Returns its place.

        Raises CheckpointError when it cannot be written, as to a full disk; that the trainer died passes through.
        """
        place = self._place(state.step)
        staging = self.folder / f".writing-{place.name}"
        self._sweep()
        try:
            staging.mkdir(parents=True)
            await save_trainer(staging)
            state = msgspec.structs.replace(state, sizes=_sizes(staging))
            (staging / _STATE).write_bytes(msgspec.msgpack.encode(state))
            _sync_tree(staging)
            if place.exists():
                shutil.rmtree(place)
            staging.rename(place)
            _sync(self.folder)
        except BaseException as error:
            self._sweep()  # half a checkpoint is of no use, and takes the room that the next one needs
            if not isinstance(error, OSError | RemoteError):
                raise
            reason = error.line if isinstance(error, RemoteError) else str(error)
            there = f"the last is {last}" if (last := self.latest()) else "there is none yet"
            raise CheckpointError(f"{place} cannot be written: {reason}; {there}; make room, then resume") from error
        for step in self.steps()[: -self.keep]:
            shutil.rmtree(self._place(step))
        return place

    def read(self, place: Path) -> RunState:
        """The driver's state in a whole checkpoint. Raises CheckpointError naming the file and the remedy."""
        path = place / _STATE
        try:
            state = msgspec.msgpack.decode(path.read_bytes(), type=RunState)
        except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
            raise CheckpointError(f"{path}: {error}; {self._remedy(place)}") from None
        if state.format != FORMAT:
            raise CheckpointError(f"{path}: format {state.format}, this version reads {FORMAT}")
        held = _sizes(place)
        for name, size in state.sizes.items():
            if held.get(name) != size:
                found = "is not there" if name not in held else f"has {held[name]} bytes"
                raise CheckpointError(f"{place / name} {found}, not the {size} written; {self._remedy(place)}")
        return state

    def check_buffer(self, place: Path, state: RunState) -> None:
        """Raise CheckpointError as `read` does when no sample buffer can be made of the state that was read there."""
        try:
            SampleBuffer.restore(msgspec.msgpack.decode(state.buffer), (), codec=PAYLOADS)
        except (msgspec.DecodeError, InvalidState) as error:
            raise CheckpointError(f"{place / _STATE}: the sample buffer: {error}; {self._remedy(place)}") from None

    def _remedy(self, place: Path) -> str:
        if self.steps()[:1] == [int(place.name.removeprefix("step-"))]:
            return "there is no older one: start the run anew with --overwrite"
        return f"remove {place} to resume from an older one"

    def _place(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def _sweep(self) -> None:
        if self.folder.is_dir():
            for entry in self.folder.glob(".writing-*"):
                shutil.rmtree(entry)


def _sizes(folder: Path) -> dict[str, int]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


def _sync_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
