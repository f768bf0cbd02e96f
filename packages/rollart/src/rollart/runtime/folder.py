"""The run folder `runs/NAME`: what a run leaves behind, and the one process that may write to it.

    config.yaml  run.json  metrics.jsonl  trace.json  tensorboard/  logs/  checkpoints/  report.html  model-final/

A folder is never overwritten without being asked to, and two runs never write to one folder (an exclusive
lock that dies with its holder). Held by tests/rollart/test_rollart_folder.py.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from typing import IO

from rollart.config import Config, dump_config, load_config
from rollart.config.check import check_resumable
from rollart.errors import ConfigError, RunExists, RunMissing
from rollart.observe.runinfo import LOCK
from rollart.runtime.checkpoint import Checkpoints

CONFIG = "config.yaml"
REPORT = "report.html"


class RunFolder:
    """The files of one run, by name."""

    def __init__(self, path: Path, keep: int = 2) -> None:
        """`keep` is how many checkpoints stay."""
        self.path = path.resolve()
        self.checkpoints = Checkpoints(self.path / "checkpoints", keep)
        self._lock: IO[str] | None = None

    @classmethod
    def of(cls, config: Config) -> RunFolder:
        """The folder that a configuration names."""
        return cls(Path(config.run.folder) / config.run.name, config.checkpoint.keep)

    @property
    def report(self) -> Path:
        return self.path / REPORT

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def exists(self) -> bool:
        """True when a run was started here."""
        return (self.path / CONFIG).is_file()

    def stored_config(self) -> Config:
        """The configuration that the run was started with. Raises RunMissing."""
        if not self.exists():
            raise RunMissing(f"{self.path} holds no run (no {CONFIG})")
        try:
            return load_config(self.path / CONFIG)
        except ConfigError as error:
            raise RunMissing(f"{self.path / CONFIG} is not this version's ({error}); use --overwrite") from None

    def create(self, config: Config, *, overwrite: bool = False) -> None:
        """Start a new run here. Raises RunExists when there is one and `overwrite` is false, or when the folder holds
        something that is no run: that is never removed."""
        if self.exists() and not overwrite:
            raise RunExists(
                f"{self.path} holds a run already; continue it with --resume, replace it with --overwrite, "
                "or give the new one a name with run.name=..."
            )
        self._make()
        if not self.exists() and any(entry.name != LOCK for entry in self.path.iterdir()):
            raise RunExists(f"{self.path} holds files that are no run's; choose another run.folder or run.name")
        self._acquire()
        for entry in self.path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name != LOCK:
                entry.unlink()
        self._write(config)

    def reopen(self, config: Config) -> None:
        """Continue the run that is here. Raises RunMissing without a checkpoint, ConfigError if unfit."""
        self.hold(config)
        self._write(config)

    def hold(self, config: Config) -> None:
        """Keep other processes away from the run that is here, to use its checkpoint. Raises as `reopen` does."""
        stored = self.stored_config()
        if self.checkpoints.latest() is None:
            raise RunMissing(
                f"{self.path} holds no checkpoint; start it anew: rollart train {self.path / CONFIG} --overwrite"
            )
        check_resumable(config, stored)
        self._acquire()

    def close(self) -> None:
        """Let another process use the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _make(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = f"cannot make the run's folder there ({error.strerror}); choose another"
            raise ConfigError("run.folder", str(self.path.parent), reason) from None

    def _write(self, config: Config) -> None:
        self.logs.mkdir(exist_ok=True)
        (self.path / CONFIG).write_text(dump_config(config), encoding="utf-8")

    def _acquire(self) -> None:
        try:
            lock = (self.path / LOCK).open("a+")
        except OSError as error:
            reason = f"cannot write to the run's folder ({error.strerror}); choose another"
            raise ConfigError("run.folder", str(self.path.parent), reason) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip() or "another process"
            lock.close()
            raise RunExists(f"{self.path} is in use by process {holder}; wait for it, or stop it") from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        self._lock = lock
