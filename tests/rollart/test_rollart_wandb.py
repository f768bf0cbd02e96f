"""What Weights & Biases is told, recorded offline by the real library."""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rollart.errors import ConfigError
from rollart.observe.wandb import WandbRun

STARTED = datetime(2026, 11, 30, 17, 59, tzinfo=UTC)


@pytest.fixture
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.real
@pytest.mark.usefixtures("_offline")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_rows_are_recorded_without_a_key(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="the extra rollart[wandb] is not installed")
    run = WandbRun("project", "name", tmp_path, {"train": {"lr": 1e-3}}, started=STARTED)
    run.write({"step": 1, "reward/mean": 0.25, "eval/success": None})
    run.close()
    (record,) = (tmp_path / "wandb").glob("offline-run-*/run-name-20261130-175900.wandb")
    deadline = time.monotonic() + 30
    while b"reward/mean" not in record.read_bytes():  # its service writes when it likes
        assert time.monotonic() < deadline, record.read_bytes()
        time.sleep(0.05)
    assert b"eval/success" not in record.read_bytes()


def test_without_the_library_the_key_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"run\.wandb.*rollart\[wandb\]"):
        WandbRun("project", "name", tmp_path, {}, started=None)
