"""The weight store of a run: there while it is used, gone afterwards; the second choice is announced."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from rollart.config.schema import WeightsConfig
from rollart.runtime.store import folders_of, weight_stores
from weightsync import Publisher, Subscriber, open_store
from weightsync.errors import StoreUnavailable
from weightsync.mooncake_master import MooncakeMaster


async def carries_weights(url: str) -> None:
    ours, theirs = open_store(url), open_store(url)
    weights = {"w": np.arange(1000, dtype=np.float32)}
    await Publisher(ours, bucket_bytes=1 << 20).publish(1, weights)
    subscriber = Subscriber(theirs)
    loaded: dict[str, bytes] = {}
    staged = await subscriber.prefetch(1, timeout=30)
    await subscriber.commit(staged, lambda name, tensor: loaded.update({name: bytes(tensor.data)}))
    assert loaded["w"] == weights["w"].tobytes()
    await subscriber.close()
    await ours.close()
    await theirs.close()


async def test_shared_memory_leaves_nothing() -> None:
    async with weight_stores(WeightsConfig(store="shm"), 2) as urls:
        assert len(set(urls)) == 2
        for url in urls:
            await carries_weights(url)
    assert not list(Path("/dev/shm").glob(f"weightsync-rollart-{os.getpid()}-*"))


async def test_its_folders_are_known_and_may_be_gone_before_it_ends() -> None:
    async with weight_stores(WeightsConfig(store="shm"), 2) as urls:
        folders = folders_of(urls)
        assert [folder.is_dir() for folder in folders] == [True, True]
        for folder in folders:
            shutil.rmtree(folder)
    assert folders_of(["mooncake://127.0.0.1:1"]) == []


@pytest.mark.real
async def test_mooncake_is_the_first_choice() -> None:
    pytest.importorskip("mooncake.store", reason="Mooncake's system library libibverbs1 is not installed")
    async with weight_stores(WeightsConfig(store="auto", segment_mb=64), 2) as urls:
        assert all(url.startswith("mooncake://127.0.0.1:") for url in urls)
        for url in urls:
            await carries_weights(url)


async def unavailable(self: MooncakeMaster) -> MooncakeMaster:
    raise StoreUnavailable("Debian package libibverbs1 is not installed")


async def test_the_second_choice_is_announced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(MooncakeMaster, "start", unavailable)
    with caplog.at_level(logging.WARNING):
        async with weight_stores(WeightsConfig(store="auto"), 1) as (url,):
            assert url.startswith("shm:")
    assert "libibverbs1" in caplog.text
    with pytest.raises(StoreUnavailable):
        async with weight_stores(WeightsConfig(store="mooncake"), 1):
            pass
