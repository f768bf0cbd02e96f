"""Random interleavings of publishers that fail, die and take over, rewinds and a subscriber, checked after each.

The store fails or dies at a certain call, a deletion half-way. The model knows what each version may hold: what was
published under its number, and, until the next success, what a publication that failed may have left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weightsync import (
    CorruptBucket,
    Fenced,
    Manifest,
    MemoryStore,
    Publisher,
    StoreUnavailable,
    Subscriber,
    Tensor,
    VersionConflict,
    inspect,
)
from weightsync.manifest import manifest_key
from weightsync.tensors import Bytes

pytestmark = pytest.mark.seconds

SIZE = 200


class Killed(BaseException):
    """The process that made the call is gone."""


class Doomed(MemoryStore):
    """Fails at the call number `left` that changes it: once, or, where the caller dies, from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.left = -1
        self.dies = False

    def step(self) -> None:
        self.left -= 1
        if self.left == -1 or (self.dies and self.left < 0):
            raise Killed if self.dies else StoreUnavailable("gone for a moment")

    def doom(self, left: int, dies: bool) -> None:
        self.left, self.dies = left, dies

    def save(self) -> None:
        self.left, self.dies = -1, False

    async def put(self, key: str, parts: Sequence[Bytes]) -> None:
        self.step()
        await super().put(key, parts)

    async def replace(self, key: str, value: bytes) -> None:
        self.step()
        await super().replace(key, value)

    async def delete(self, keys: Sequence[str]) -> None:
        for number, key in enumerate(keys):
            if number == len(keys) // 4:
                self.step()
            await super().delete([key])


DOOM = st.one_of(st.none(), st.tuples(st.integers(0, 14), st.booleans()))


class WeightMachine(RuleBasedStateMachine):
    @initialize(delta=st.booleans(), keep=st.integers(1, 3), anchor_every=st.integers(1, 4))
    def start(self, delta: bool, keep: int, anchor_every: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.options: dict[str, Any] = {
            "bucket_bytes": 256,
            "encoding": "delta" if delta else "full",
            "keep": keep,
            "anchor_every": anchor_every,
        }
        self.store = Doomed()
        self.publisher = Publisher(self.store, **self.options)
        self.subscriber = Subscriber(self.store, timeout=10)
        self.weights = np.zeros(SIZE, np.float32)
        self.may_hold: dict[int, list[bytes]] = {}
        self.next = 0
        self.clean = True

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.run(self.subscriber.close())
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    def attempt(self, work: Coroutine[Any, Any, Any], doom: tuple[int, bool] | None) -> Any:
        """What the work gives; None where it failed, with another publisher where it died."""
        if doom is not None:
            self.store.doom(*doom)
        try:
            return self.run(work)
        except StoreUnavailable:
            self.clean = False
        except Killed:
            self.clean = False
            self.publisher = Publisher(self.store, **self.options)
        finally:
            self.store.save()
        return None

    @rule(skip=st.integers(0, 1), changes=st.integers(0, 8), seed=st.integers(0, 1000), doom=DOOM)
    def publish(self, skip: int, changes: int, seed: int, doom: tuple[int, bool] | None) -> None:
        self.weights[np.random.default_rng(seed).integers(0, SIZE, changes)] += 1
        version, content = self.next + skip, self.weights.tobytes()
        self.may_hold.setdefault(version, []).append(content)
        try:
            manifest: Manifest | None = self.attempt(
                self.publisher.publish(version, {"w": self.weights.copy()}), doom
            )
        except VersionConflict:  # a publication that failed stands
            self.store.save()
            self.may_hold[version].pop()
            self.next = max(self.next, version + 1)
            return
        if manifest is not None:
            self.may_hold[version] = [content]
            self.next, self.clean = version + 1, True

    @precondition(lambda self: self.next)
    @rule(back=st.integers(0, 3), doom=DOOM)
    def rewind(self, back: int, doom: tuple[int, bool] | None) -> None:
        version = max(0, self.next - 1 - back)

        async def rewind() -> bool:
            await self.publisher.rewind(version)
            return True

        if self.attempt(rewind(), doom):
            self.next, self.clean = version + 1, True
            self.may_hold = {number: held for number, held in self.may_hold.items() if number <= version}
            assert all(info.version <= version for info in self.run(inspect(self.store)))

    @precondition(lambda self: self.publisher.stats().versions)
    @rule()
    def take_over(self) -> None:
        old, self.publisher = self.publisher, Publisher(self.store, **self.options)
        self.run(self.publisher.rewind(1 << 40))
        with pytest.raises(Fenced):
            self.run(old.rewind(0))

    @rule()
    def forget(self) -> None:
        """As a Mooncake master that was started anew."""
        self.store._objects.clear()
        self.store._values.clear()
        self.may_hold.clear()
        self.clean = False

    @rule(which=st.integers(0, 5), spoils=st.booleans())
    def pull(self, which: int, spoils: bool) -> None:
        found = self.run(inspect(self.store))
        if not found:
            return
        version = found[which % len(found)].version
        got: list[bytes] = []

        def load(name: str, tensor: Tensor) -> None:
            got.append(tensor.data.tobytes())

        staged = self.run(self.subscriber.prefetch(version))
        if spoils:
            staged.staging.array[7] ^= 1
            with pytest.raises(CorruptBucket, match="prefetch it again"):
                self.run(self.subscriber.commit(staged, load))
            assert not got
            staged = self.run(self.subscriber.prefetch(version))
        report = self.run(self.subscriber.commit(staged, load))
        assert report.digest == found[which % len(found)].digest and got[0] in self.may_hold[version]

    @invariant()
    def every_version_is_whole(self) -> None:
        found = self.run(inspect(self.store))
        assert not any(info.bad for info in found)
        assert {info.version for info in found} <= self.may_hold.keys()
        versions = [info.version for info in found]
        assert versions == sorted(versions)

    @invariant()
    def nothing_is_left_behind(self) -> None:
        """After a success the store holds what its versions are made of."""
        if self.clean and self.publisher.stats().versions:
            keys: set[str] = set()
            for version in self.publisher.stats().versions:
                manifest = Manifest.decode(self.store._objects[manifest_key(version)].tobytes())
                sent = [number for number, bucket in enumerate(manifest.buckets) if bucket.wire_bytes]
                keys |= {manifest_key(version), *(manifest.key(number) for number in sent)}
            assert self.store._objects.keys() == keys


WeightMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
TestWeights = WeightMachine.TestCase
