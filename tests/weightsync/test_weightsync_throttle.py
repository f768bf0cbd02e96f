"""The bandwidth cap, on virtual time."""

from __future__ import annotations

import asyncio

import async_solipsism
import numpy as np
import pytest

from weightsync import BadConfig, MemoryStore, ThrottledStore


async def share_the_link() -> None:
    store = ThrottledStore(MemoryStore(), 1000)
    start = asyncio.get_running_loop().time()
    await store.put("a", [np.ones(500, np.uint8)])
    assert asyncio.get_running_loop().time() - start == pytest.approx(0.5)
    buffers = [np.zeros(500, np.uint8) for _ in range(4)]
    async with asyncio.TaskGroup() as group:
        for buffer in buffers:
            group.create_task(store.get_into("a", 0, buffer))
    assert asyncio.get_running_loop().time() - start == pytest.approx(2.5)
    assert all(buffer.all() for buffer in buffers)
    # An idle link saves nothing up.
    await asyncio.sleep(100)
    await store.get_into("a", 0, buffers[0])
    assert asyncio.get_running_loop().time() - start == pytest.approx(103.0)


def test_transfers_share_the_link() -> None:
    with asyncio.Runner(loop_factory=async_solipsism.EventLoop) as runner:
        runner.run(share_the_link())


@pytest.mark.parametrize("cap", [0, -1.0, float("nan"), float("inf")])
def test_a_cap_is_positive_and_finite(cap: float) -> None:
    with pytest.raises(BadConfig, match=f"bytes_per_second is {cap}"):
        ThrottledStore(MemoryStore(), cap)
