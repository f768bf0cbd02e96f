"""Host memory beyond the model: a publisher holds two buckets (deltas: and a snapshot), a subscriber two.

Strided tensors are copied, a bucket and a piece of the next for each of the two in flight.
"""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from weightsync import FileStore, Publisher, Subscriber

MIB = 1 << 20
MODEL, BUCKET = 24 * MIB, MIB


@pytest.mark.parametrize(("encoding", "snapshot"), [("full", 0), ("delta", MODEL)])
@pytest.mark.parametrize(("strided", "buckets"), [(False, 1), (True, 4)])
async def test_peaks(
    tmp_path: Path, encoding: Literal["full", "delta"], snapshot: int, strided: bool, buckets: int
) -> None:
    store = FileStore(tmp_path, durable=False)
    weights: dict[str, np.ndarray] = {f"w{number}": np.zeros(3 * MIB, np.uint8) for number in range(8)}
    if strided:
        weights["w0"] = np.zeros((2 * MIB, 3), np.uint8)[:, 0]
        weights["w1"] = np.zeros((1000, 3000), np.uint8).T
    publisher, subscriber = Publisher(store, bucket_bytes=BUCKET, encoding=encoding), Subscriber(store)
    for version in range(3):
        for array in weights.values():
            array[version] = 1
        tracemalloc.start()
        await publisher.publish(version, weights)
        held, published = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        staged = await subscriber.prefetch(version)
        await subscriber.commit(staged, lambda name, tensor: None)
        pulled = tracemalloc.get_traced_memory()[1] - held
        tracemalloc.stop()
        # The snapshot is made by the first publication; staging is memory of its own, one model, and not counted.
        assert published <= (0 if version else snapshot) + buckets * BUCKET, version
        assert pulled <= BUCKET, version
    await subscriber.close()
