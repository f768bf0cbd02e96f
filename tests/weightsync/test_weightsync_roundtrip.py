"""Every bit of every dtype arrives, whichever way it is encoded."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync import MemoryStore, Publisher, Subscriber, Tensor
from weightsync.dtypes import ITEMSIZE


async def loaded(subscriber: Subscriber, version: int) -> dict[str, tuple[tuple[int, ...], bytes]]:
    found: dict[str, tuple[tuple[int, ...], bytes]] = {}

    def load(name: str, tensor: Tensor) -> None:
        found[name] = (tensor.meta.shape, tensor.data.tobytes())

    await subscriber.commit(await subscriber.prefetch(version), load)
    return found


@pytest.mark.parametrize("encoding", ["full", "delta"])
async def test_every_dtype_arrives_bit_for_bit(encoding: Literal["full", "delta"]) -> None:
    rng = np.random.default_rng(1)
    store = MemoryStore()
    publisher, subscriber = Publisher(store, bucket_bytes=192, encoding=encoding), Subscriber(store)
    weights: dict[str, Any] = {}
    for dtype, size in ITEMSIZE.items():
        # All bit patterns, so NaN payloads too; torch knows every dtype of the table.
        raw = torch.from_numpy(rng.integers(0, 2 if dtype == "bool" else 256, 37 * size, dtype=np.uint8))
        weights[dtype] = raw.view(getattr(torch, dtype))
    for version in range(4):
        weights["float32"][version] = -0.0
        weights["bfloat16"].view(torch.int16)[: 3 * version] = 0x7FC1 + version
        await publisher.publish(version, weights)
        found = await loaded(subscriber, version)
        for name, tensor in weights.items():
            assert found[name] == ((37,), tensor.view(torch.uint8).numpy().tobytes()), name
    await subscriber.close()


@settings(max_examples=30, deadline=None)
@given(st.data(), st.sampled_from(["full", "delta"]), st.integers(1, 5))
async def test_any_history_of_versions(
    data: st.DataObject, encoding: Literal["full", "delta"], anchor_every: int
) -> None:
    """Random shapes and changes; one subscriber follows some versions, another joins at the end."""
    store = MemoryStore()
    publisher = Publisher(
        store, bucket_bytes=64 * data.draw(st.integers(1, 4)), encoding=encoding, anchor_every=anchor_every
    )
    follower, late = Subscriber(store), Subscriber(store)
    shapes = data.draw(st.lists(st.lists(st.integers(0, 5), max_size=2).map(tuple), max_size=5))
    kinds = [np.int8, np.float16, np.float32, np.complex128]
    weights: dict[str, Any] = {
        f"t{i}": np.zeros(shape, data.draw(st.sampled_from(kinds))) for i, shape in enumerate(shapes)
    }
    versions = data.draw(st.integers(1, 6))
    for version in range(versions):
        for array in weights.values():
            flat = array.reshape(-1)
            if flat.size and data.draw(st.booleans()):
                flat[data.draw(st.integers(0, flat.size - 1))] += 1
        manifest = await publisher.publish(version, weights)
        expected = {name: (array.shape, array.tobytes()) for name, array in weights.items()}
        if data.draw(st.booleans()) or version == versions - 1:
            assert await loaded(follower, version) == expected
            assert (await follower.prefetch(version)).manifest == manifest
    assert await loaded(late, versions - 1) == expected
    await follower.close()
    await late.close()


@pytest.mark.parametrize("encoding", ["full", "delta"])
async def test_copies_have_the_digest_of_views(encoding: Literal["full", "delta"]) -> None:
    """Padding is zero in memory that was used for another bucket, too."""
    rng = np.random.default_rng(0)
    contiguous = {f"w{size}": rng.integers(1, 256, size, dtype=np.uint8) for size in (128, 500, 33, 250, 65, 127, 9)}
    strided = {name: np.repeat(array, 2)[::2] for name, array in contiguous.items()}
    found = []
    for weights in (contiguous, strided):
        publisher = Publisher(MemoryStore(), bucket_bytes=256, encoding=encoding)
        found.append([(await publisher.publish(version, weights)).digest for version in range(2)])
    assert found[0] == found[1] and len(set(found[0])) == 1
