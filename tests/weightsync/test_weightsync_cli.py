"""`weightsync inspect` tells what a store holds and whether it is sound."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from weightsync import FileStore, MemoryStore, Publisher, inspect
from weightsync.cli import main
from weightsync.tensors import Bytes


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    publisher = Publisher(FileStore(tmp_path), bucket_bytes=1024, encoding="delta")
    weights = np.zeros(1000, np.float32)
    for version in range(2):
        weights[version] = 1
        await publisher.publish(version, {"w": weights})
    return tmp_path


def test_versions_are_listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", f"file:{folder}"]) == 0
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.startswith("version")
    assert first.split()[:7] == ["0", "-", "1", "4", "4032", "4032", "100.000%"]
    assert second.split()[:2] == ["1", "0"] and second.split()[-1] == "good"


def test_a_bad_bucket_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    next(folder.glob("v0.*.2")).write_bytes(b"x" * 1024)
    assert main(["inspect", "--json", f"file:{folder}"]) == 1
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["bad"] == [2] and second["bad"] == []
    assert main(["inspect", "--no-verify", f"file:{folder}"]) == 0


def test_a_bad_url_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "nowhere"]) == 2
    assert "use shm:NAME" in capsys.readouterr().err


def test_a_store_that_is_not_there_is_told_and_not_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for url in (f"file:{tmp_path}/none", "shm:that-nobody-made"):
        assert main(["inspect", url]) == 2
        assert f"there is no store at {url}" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


async def test_a_version_that_is_removed_while_it_is_read_is_not_bad() -> None:
    class Training(MemoryStore):
        overtaken = False

        async def get_into(self, key: str, offset: int, buffer: Bytes) -> None:
            if not self.overtaken:
                self.overtaken = True
                await publisher.publish(1, {"w": np.ones(10)})
            await super().get_into(key, offset, buffer)

    store = Training()
    publisher = Publisher(store, keep=1)
    await publisher.publish(0, {"w": np.zeros(10)})
    assert await inspect(store) == []
    assert [(info.version, info.bad) for info in await inspect(store)] == [(1, ())]
