"""What stays in a store and what goes; who may write; what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync import (
    BadConfig,
    Fenced,
    LayoutChanged,
    MemoryStore,
    Publisher,
    StoreError,
    StoreUnavailable,
    Subscriber,
    VersionConflict,
    inspect,
)
from weightsync.index import HOLD_SLOTS, Entry, Index, hold_key
from weightsync.tensors import Bytes


def weights(seed: int, size: int = 64) -> dict[str, np.ndarray]:
    return {"w": np.full(size, seed, np.float32)}


async def versions(store: MemoryStore) -> list[int]:
    found = await inspect(store)
    assert not any(info.bad for info in found)
    return [info.version for info in found]


@pytest.mark.parametrize(("encoding", "left"), [("full", [4, 5]), ("delta", [3, 4, 5])])
async def test_the_last_versions_and_their_bases_stay(
    memory: MemoryStore, encoding: Literal["full", "delta"], left: list[int]
) -> None:
    publisher = Publisher(memory, keep=2, encoding=encoding, anchor_every=3)
    array = np.zeros(4096, np.float32)
    for version in range(6):
        array[version] = 1
        await publisher.publish(version, {"w": array})
    assert await versions(memory) == left
    keys = {key.split(".")[0] for key in memory._objects}
    assert keys == {f"v{version}" for version in left}


@given(st.lists(st.booleans(), max_size=12), st.integers(1, 4))
def test_retention_keeps_what_the_kept_versions_need(anchors: list[bool], keep: int) -> None:
    entries = tuple(
        Entry(version, "a", 1, None if anchor or not version else version - 1)
        for version, anchor in enumerate(anchors)
    )
    gone = {entry.version for entry in Index("o", entries).surplus(keep)}
    kept = [entry for entry in entries if entry.version not in gone]
    assert kept[-keep:] == list(entries[-keep:])
    for entry in kept:
        assert entry.base is None or entry.base not in gone
    for entry in kept[:-keep]:
        assert any(other.base == entry.version for other in kept), "nothing is kept in vain"


async def test_a_version_that_is_held_stays_for_a_while(memory: MemoryStore) -> None:
    publisher = Publisher(memory, keep=1, hold_seconds=3600)
    await publisher.publish(0, weights(0))
    await memory.put(hold_key(0, 5), [np.ones(1, np.uint8)])
    await publisher.publish(1, weights(1))
    await publisher.publish(2, weights(2))
    assert await versions(memory) == [0, 2]
    await memory.delete([hold_key(0, 5)])
    await publisher.publish(3, weights(3))
    assert await versions(memory) == [3]


async def test_a_hold_that_nobody_releases_ends(memory: MemoryStore) -> None:
    publisher = Publisher(memory, keep=1, hold_seconds=0)
    await publisher.publish(0, weights(0))
    await memory.put(hold_key(0, 0), [np.ones(1, np.uint8)])
    await publisher.publish(1, weights(1))
    assert await versions(memory) == [1] and len(memory._objects) == 2


async def test_a_pull_holds_its_version_and_lets_go(memory: MemoryStore) -> None:
    subscriber = Subscriber(memory)
    await Publisher(memory).publish(0, weights(0))
    slots = [hold_key(0, slot) for slot in range(HOLD_SLOTS)]
    held: list[bool] = []
    get_into = memory.get_into

    async def spy(key: str, offset: int, buffer: np.ndarray) -> None:
        held.append(any(await memory.present(slots)))
        await get_into(key, offset, buffer)

    memory.get_into = spy  # type: ignore[method-assign]
    await subscriber.prefetch(0)
    assert held == [True] and not any(await memory.present(slots))
    await subscriber.close()


async def test_the_same_content_again_changes_nothing(memory: MemoryStore) -> None:
    publisher = Publisher(memory)
    manifest = await publisher.publish(1, weights(1))
    before = dict(memory._objects)
    assert await publisher.publish(1, weights(1)) == manifest
    assert await Publisher(memory).publish(1, weights(1)) == manifest
    assert memory._objects == before


async def test_other_content_and_older_versions_are_refused(memory: MemoryStore) -> None:
    publisher = Publisher(memory, keep=1)
    await publisher.publish(1, weights(1))
    with pytest.raises(VersionConflict, match="other content"):
        await publisher.publish(1, weights(2))
    with pytest.raises(VersionConflict, match="older than the latest, 1"):
        await publisher.publish(0, weights(0))
    assert await versions(memory) == [1]


async def test_rewind_makes_room_for_a_resumed_run(memory: MemoryStore) -> None:
    publisher = Publisher(memory, keep=3, encoding="delta")
    for version in range(4):
        await publisher.publish(version, weights(version))
    await publisher.rewind(1)
    assert await versions(memory) == [1] and await Subscriber(memory).latest() == 1
    await publisher.publish(2, weights(9))
    assert await versions(memory) == [1, 2]


async def test_the_later_publisher_fences_the_earlier(memory: MemoryStore) -> None:
    first, second = Publisher(memory), Publisher(memory)
    await first.publish(0, weights(0))
    await second.publish(1, weights(1))
    with pytest.raises(Fenced):
        await first.publish(2, weights(2))
    await second.publish(2, weights(2))
    assert await versions(memory) == [1, 2]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"w": np.zeros(63, np.float32)}, r"'w' is float32\[63\], version 0 had float32\[64\]"),
        ({"w": np.zeros(64, np.float16)}, "'w' is float16"),
        ({}, "'w' is absent"),
        ({**weights(0), "v": np.zeros(1)}, "'v' is float64"),
    ],
)
async def test_a_changed_layout_is_refused(memory: MemoryStore, changed: dict[str, np.ndarray], message: str) -> None:
    publisher = Publisher(memory)
    await publisher.publish(0, weights(0))
    with pytest.raises(LayoutChanged, match=message):
        await publisher.publish(1, changed)
    with pytest.raises(LayoutChanged, match="bucket_bytes is 128"):
        await Publisher(memory, bucket_bytes=128).publish(1, weights(1))


@pytest.mark.parametrize("version", [-1, "1", 1.5, None])
async def test_a_version_that_is_no_number_leaves_nothing(memory: MemoryStore, version: Any) -> None:
    with pytest.raises(BadConfig, match="use a whole number from 0"):
        await Publisher(memory).publish(version, weights(1))
    assert not memory._objects and not memory._values


@pytest.mark.parametrize("options", [{"keep": 0}, {"anchor_every": 0}, {"encoding": "zip"}, {"timeout": 0}])
def test_bad_options_are_named(memory: MemoryStore, options: dict[str, object]) -> None:
    with pytest.raises(BadConfig, match=next(iter(options))):
        Publisher(memory, **options)  # type: ignore[arg-type]


async def test_the_bases_of_what_is_held_stay_too(memory: MemoryStore) -> None:
    """Who pulls a delta from nothing needs all versions back to the anchor."""
    publisher = Publisher(memory, keep=1, encoding="delta", anchor_every=3)
    array = np.zeros(4096, np.float32)
    for version in range(4):
        array[version] = 1
        if version == 3:
            await memory.put(hold_key(2, 5), [np.ones(1, np.uint8)])
        await publisher.publish(version, {"w": array})
    assert await versions(memory) == [0, 1, 2, 3]
    await memory.delete([hold_key(2, 5)])
    await publisher.publish(4, {"w": array})
    assert await versions(memory) == [3, 4]


class Pausing(MemoryStore):
    """Stops the first one who puts a bucket of version 1 until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.stopped, self.go_on = asyncio.Event(), asyncio.Event()

    async def put(self, key: str, parts: Sequence[Bytes]) -> None:
        if key.startswith("v1.") and not self.stopped.is_set():
            self.stopped.set()
            await self.go_on.wait()
        await super().put(key, parts)


async def test_a_publisher_that_hung_in_the_middle_finds_that_another_took_over() -> None:
    store = Pausing()
    hung, other, subscriber = Publisher(store), Publisher(store), Subscriber(store)
    await hung.publish(0, weights(0))
    publication = asyncio.create_task(hung.publish(1, weights(7)))
    await store.stopped.wait()
    manifest = await other.publish(1, weights(1))
    store.go_on.set()
    with pytest.raises(Fenced):
        await publication
    staged = await subscriber.prefetch(1)
    assert staged.manifest == manifest
    await other.publish(2, weights(2))
    assert await versions(store) == [1, 2] and len(store._objects) == 4, "the other one goes on, and nothing is left"
    await subscriber.close()


async def test_a_store_that_forgets_in_the_middle_announces_no_half_version() -> None:
    store = Pausing()
    publisher = Publisher(store, bucket_bytes=128, encoding="delta")
    await publisher.publish(0, weights(0))
    publication = asyncio.create_task(publisher.publish(1, weights(1)))
    await store.stopped.wait()
    store._objects.clear()
    store._values.clear()
    store.go_on.set()
    with pytest.raises(StoreError, match="lost everything while version 1"):
        await publication
    await publisher.publish(1, weights(1))
    assert await versions(store) == [1]


@pytest.mark.parametrize("done", range(5))
async def test_a_rewind_that_was_cut_off_is_ended_by_whoever_comes_next(memory: MemoryStore, done: int) -> None:
    publisher, subscriber = Publisher(memory, keep=3), Subscriber(memory)
    for version in range(3):
        await publisher.publish(version, weights(version))
    replace, delete, left = memory.replace, memory.delete, done

    async def step() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise StoreUnavailable("gone")

    async def replaced(key: str, value: bytes) -> None:
        await step()
        await replace(key, value)

    async def deleted(keys: Sequence[str]) -> None:
        await step()
        await delete(keys)

    memory.replace, memory.delete = replaced, deleted  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailable):
        await publisher.rewind(0)
    memory.replace, memory.delete = replace, delete  # type: ignore[method-assign]
    other = Publisher(memory, keep=3)
    await other.rewind(0)
    manifest = await other.publish(1, weights(9))
    assert (await subscriber.prefetch(1)).manifest == manifest
    assert await versions(memory) == [0, 1] and len(memory._objects) == 4
    await subscriber.close()


async def test_a_store_that_fails_a_new_publisher_once_has_not_been_taken_over(memory: MemoryStore) -> None:
    await Publisher(memory).publish(0, weights(0))
    publisher, replace = Publisher(memory), memory.replace

    async def failing(key: str, value: bytes) -> None:
        memory.replace = replace  # type: ignore[method-assign]
        raise StoreUnavailable("gone for a moment")

    memory.replace = failing  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailable):
        await publisher.publish(1, weights(1))
    await publisher.publish(1, weights(1))
    assert await versions(memory) == [0, 1]
