"""Deltas are exact, idempotent, small, and refuse what is not theirs."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync import CorruptBucket, MemoryStore, Publisher, Subscriber, delta


@given(st.data(), st.sampled_from([1, 2, 4, 8]), st.integers(0, 2000), st.floats(0, 1))
def test_a_delta_makes_the_old_the_new(data: st.DataObject, width: int, count: int, density: float) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    old = rng.integers(0, 256, count * width, dtype=np.uint8)
    new = old.copy()
    changed = rng.random(count) < density
    new.view(f"u{width}")[changed] ^= 1
    base, runs = old.copy(), [(width, old.size)]
    parts, found = delta.encode(runs, old, lambda start, stop: new[start:stop])
    assert np.array_equal(old, new) and found == changed.sum()
    if parts:
        for _ in range(2):
            delta.apply(runs, base, np.concatenate(parts))
            assert np.array_equal(base, new)
    elif parts is not None:
        assert found == 0
    else:
        assert found * (width + 1) > 0.5 * new.size


@given(st.lists(st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(1, 60)), max_size=6), st.integers(0, 99))
def test_runs_and_blocks_of_any_kind(shape: list[tuple[int, int]], percent: int) -> None:
    """Several widths in a bucket, and blocks so small that changes of a run lie in many."""
    runs = [(width, 64 * count) for width, count in shape]
    rng = np.random.default_rng(percent)
    old = rng.integers(0, 256, sum(size for _, size in runs), dtype=np.uint8)
    new = np.where(rng.integers(0, 300, old.size) < percent, old ^ 1, old).astype(np.uint8)
    base = old.copy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "_COMPARED", 64)
        patch.setattr(delta, "_BLOCK", 7)
        parts, _ = delta.encode(runs, old, lambda start, stop: new[start:stop])
        assert np.array_equal(old, new)
        if parts:
            delta.apply(runs, base, np.concatenate(parts))
            assert np.array_equal(base, new)


@pytest.mark.parametrize(("width", "limit"), [(2, 0.017), (1, 0.023), (4, 0.014)])
def test_size_at_one_percent(width: int, limit: float) -> None:
    rng = np.random.default_rng(0)
    old = rng.integers(0, 256, 1 << 21, dtype=np.uint8)
    new = old.copy()
    words = new.view(f"u{width}")
    where = rng.random(words.size) < 0.01
    words[where] = rng.integers(0, 256, int(where.sum()) * width, dtype=np.uint8).view(f"u{width}")
    parts, _ = delta.encode([(width, old.size)], old, lambda start, stop: new[start:stop])
    assert parts is not None and sum(part.size for part in parts) <= limit * new.size


@given(st.binary(max_size=60))
def test_rubbish_is_refused(payload: bytes) -> None:
    content = np.zeros(64, np.uint8)
    with pytest.raises(CorruptBucket):
        delta.apply([(2, 64), (4, 0)], content, np.frombuffer(payload, np.uint8))


def test_a_position_outside_of_the_bucket_is_refused() -> None:
    old, new = np.zeros(4096, np.uint8), np.zeros(4096, np.uint8)
    new[4000] = 1
    parts, _ = delta.encode([(1, 4096)], old, lambda start, stop: new[start:stop])
    assert parts
    with pytest.raises(CorruptBucket, match="does not decode"):
        delta.apply([(1, 64)], np.zeros(64, np.uint8), np.concatenate(parts))


@given(st.integers(0, 400), st.integers(0, 255))
def test_a_payload_that_was_touched_is_refused_or_harmless(where: int, value: int) -> None:
    """Nothing but CorruptBucket comes out, whatever a byte is made into; the checksum afterwards tells the rest."""
    old = np.arange(8192, dtype=np.uint16).view(np.uint8).copy()
    new = old.copy()
    new[::64] ^= 9
    base, runs = old.copy(), [(2, old.size)]
    payload = np.concatenate(delta.encode(runs, old, lambda start, stop: new[start:stop])[0] or [])
    payload[where % payload.size] = value
    with contextlib.suppress(CorruptBucket):
        delta.apply(runs, base, payload)


async def publish_series(store: MemoryStore, count: int, **options: int) -> tuple[Publisher, np.ndarray]:
    publisher = Publisher(store, bucket_bytes=1024, encoding="delta", **options)
    weights = np.zeros(4096, np.float32)
    for version in range(count):
        weights[version * 7] = version
        await publisher.publish(version, {"w": weights})
    return publisher, weights


async def test_anchors_come_every_so_often_and_when_most_changed(memory: MemoryStore) -> None:
    publisher, weights = await publish_series(memory, 7, anchor_every=3)
    bases = [push.wire_bytes == push.content_bytes for push in publisher.pushes]
    assert bases == [True, False, False, True, False, False, True]
    manifest = await publisher.publish(7, {"w": weights + 1})
    assert manifest.base is None and manifest.density == 1.0


async def test_unchanged_buckets_send_nothing(memory: MemoryStore) -> None:
    publisher, _ = await publish_series(memory, 2)
    assert publisher.pushes[-1].wire_bytes < 100
    assert publisher.pushes[-1].density == 1 / 4096


async def test_staging_that_is_not_the_base_is_found_out(memory: MemoryStore) -> None:
    publisher, weights = await publish_series(memory, 2)
    subscriber = Subscriber(memory)
    staged = await subscriber.prefetch(1)
    staged.staging.array[5] ^= 1
    weights[0] = 9
    await publisher.publish(2, {"w": weights})
    with pytest.raises(CorruptBucket, match="not what its deltas promise"):
        await subscriber.prefetch(2)
    # What is known to be wrong is fetched anew, from the anchor.
    again = await subscriber.prefetch(2)
    report = await subscriber.commit(again, lambda name, tensor: None)
    assert report.digest == again.manifest.digest
    await subscriber.close()
