"""Values that mean nothing, and stores that cannot be used: typed errors, before anything is written."""

from __future__ import annotations

import errno
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weightsync import BadConfig, BadTensor, FileStore, MemoryStore, Publisher, Shard, StoreUnavailable, Subscriber
from weightsync import open_store as opened
from weightsync.index import INDEX
from weightsync.notify import FolderWatch

W: dict[str, Any] = {"w": np.zeros(10, np.float32)}


@pytest.mark.parametrize("version", ["1", 1.0, True, None, -1, 1 << 63, np.int64(3), math.nan])
async def test_a_version_is_a_whole_number(version: Any) -> None:
    store = MemoryStore()
    publisher, subscriber = Publisher(store), Subscriber(store)
    for call in (publisher.publish(version, W), publisher.rewind(version), subscriber.prefetch(version)):
        with pytest.raises(BadConfig, match="version is "):
            await call
    assert await store.read(INDEX) is None


@pytest.mark.parametrize("name", ["keep", "anchor_every"])
@pytest.mark.parametrize("value", [0, "x", 1.5, math.nan, None, True])
def test_a_count_is_a_whole_number(name: str, value: Any) -> None:
    with pytest.raises(BadConfig, match=name):
        Publisher(MemoryStore(), **{name: value})


@pytest.mark.parametrize("value", ["x", math.nan, -1, None, True])
async def test_seconds_are_a_number(value: Any) -> None:
    for name in ("timeout", "hold_seconds"):
        with pytest.raises(BadConfig, match=name):
            Publisher(MemoryStore(), **{name: value})
    with pytest.raises(BadConfig, match="timeout"):
        Subscriber(MemoryStore(), timeout=value)
    if value is not None:
        with pytest.raises(BadConfig, match="timeout"):
            await Subscriber(MemoryStore()).prefetch(0, value)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (None, "publish a mapping"),
        (object(), "named_tensors"),
        ("abc", "publish a mapping"),
        ([1], "1 is no pair"),
        ([("a",)], "is no pair"),
        ({"\udcff": W["w"]}, "surrogates"),
        ({"a": np.ma.array([1.0, 2.0], mask=[0, 1])}, "mask"),
    ],
)
async def test_what_is_no_tensors_is_refused(tensors: Any, message: str) -> None:
    store = MemoryStore()
    with pytest.raises(BadTensor, match=message):
        await Publisher(store).publish(0, tensors)
    assert await store.read(INDEX) is None


@pytest.mark.parametrize("shards", [None, {"w": 3}, {"w": Shard(0, 0, 1 << 70)}, {"w": (0, 0, 10)}])
async def test_what_is_no_shard_is_refused(shards: Any) -> None:
    with pytest.raises(BadTensor, match="shard"):
        await Publisher(MemoryStore()).publish(0, W, shards)


async def test_what_cannot_load_is_refused() -> None:
    store = MemoryStore()
    await Publisher(store).publish(0, W)
    subscriber = Subscriber(store)
    load: Any = None
    with pytest.raises(BadConfig, match="load is None"):
        await subscriber.commit(await subscriber.prefetch(0), load)


@pytest.mark.parametrize(
    "url", [None, b"shm:x", 3, "file:a\0b", "mooncake://[::1", "mooncake://:1", "mooncake://h:x"]
)
def test_a_url_is_a_text_of_one_of_four_kinds(url: Any) -> None:
    with pytest.raises(BadConfig, match="store URL"):
        opened(url)


async def test_a_folder_in_the_place_of_an_object(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    for name in (INDEX, "a"):
        (tmp_path / name).mkdir()
    for call in (store.read(INDEX), store.get_into("a", 0, np.zeros(4, np.uint8)), store.delete(["a"])):
        with pytest.raises(StoreUnavailable, match=r"cannot (read|delete)"):
            await call
    with pytest.raises(StoreUnavailable, match="cannot write"):
        await store.replace(INDEX, b"x")


async def test_a_folder_that_is_gone_is_told_to_whoever_waits(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    (tmp_path / "store").rmdir()
    with pytest.raises(StoreUnavailable, match=r"cannot watch .*: No such file"):
        await Subscriber(store).prefetch(0)
    with pytest.raises(StoreUnavailable, match="cannot write"):
        await Publisher(store).publish(0, W)


def test_no_more_watches_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        def inotify_init1(self, flags: int) -> int:
            return -1

    monkeypatch.setattr("weightsync.notify._LIBC", Library())
    monkeypatch.setattr("ctypes.get_errno", lambda: errno.EMFILE)
    with pytest.raises(StoreUnavailable, match="max_user_instances"):
        FolderWatch(tmp_path)


FORKED = """
import asyncio, os, sys
import numpy as np
from weightsync import Fenced, FileStore, Publisher

publisher, tensors = Publisher(FileStore(sys.argv[1])), {"w": np.zeros(10, np.float32)}
asyncio.run(publisher.publish(0, tensors))
child = os.fork()
if not child:
    asyncio.run(publisher.publish(1, tensors))
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
try:
    asyncio.run(publisher.publish(2, tensors))
except Fenced:
    print("fenced")
"""


@pytest.mark.real
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_of_a_publisher_is_another_publisher(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FORKED, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("fenced\n", 0), done.stderr
