"""Pulling: a version is staged on the host while generation goes on, and loaded when it is time.

- What is staged is proved bucket by bucket: an object that fails its checksum is fetched once more, then refused
  (`test_weightsync_faults.py::test_a_corrupt_bucket_is_fetched_again_then_refused`).
- A pull resumes: buckets whose checksum staging already holds are not fetched again. A prefetch of another version
  supersedes the one that runs (`test_weightsync_subscriber.py`).
- `commit` only loads and checks; its digest is over the bytes that `load` was given.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec
import numpy as np

from weightsync import delta
from weightsync.blocking import each, in_thread
from weightsync.checks import check_seconds, check_version
from weightsync.errors import (
    BadTensor,
    CorruptBucket,
    EngineRefused,
    Missing,
    StoreFull,
    StoreUnavailable,
    Superseded,
    VersionGone,
    VersionTimeout,
)
from weightsync.handover import Load, Ranges, check_fits, hand_over, is_content, is_published, verify, whole
from weightsync.index import HOLD_SLOTS, INDEX, Index, hold_key
from weightsync.manifest import Manifest, Plan, manifest_key
from weightsync.staging import Staging
from weightsync.store import Store
from weightsync.tensors import Bytes

__all__ = ["Commit", "Load", "Staged", "Subscriber", "SubscriberStats"]

# One bucket is verified while the next one is fetched; a commit verifies two at a time.
_IN_FLIGHT = 2
# Fetched at a time: a cancelled pull stops, and a bandwidth cap acts, within one slice.
_SLICE_BYTES = 64 << 20


class Staged(msgspec.Struct, frozen=True):
    """A version in host memory. `seconds` is the accumulated pull: from the manifest to the last verified bucket."""

    manifest: Manifest
    plan: Plan
    staging: Staging
    seconds: float
    wire_bytes: int
    ranges: Ranges

    @property
    def version(self) -> int:
        return self.manifest.version


class Commit(msgspec.Struct, frozen=True):
    """What was loaded, and the exposed pull: the `seconds` that the commit took."""

    version: int
    digest: str
    seconds: float
    content_bytes: int
    tensors: int


class SubscriberStats(msgspec.Struct, frozen=True):
    """Totals since the subscriber was made; the last three of what the present is, or None."""

    pulls: int
    pull_seconds: float
    wire_bytes: int
    refetched: int
    commits: int
    exposed_seconds: float
    pulling: int | None
    staged: int | None
    committed: int | None


class Subscriber:
    """One reader, with staging memory for one model: only the last prefetched version can be committed."""

    def __init__(
        self, store: Store, *, timeout: float = 3600.0, needs: Callable[[Plan], Ranges] | None = None
    ) -> None:
        """`needs` says what of which buckets to stage (default: all); with it, only `commit_with` can commit."""
        check_seconds("timeout", timeout)
        self._store = store
        self._needs = needs
        self._timeout = timeout
        self._id = secrets.token_hex(8)
        self._pull: asyncio.Task[Staged] | None = None
        self._version: int | None = None
        self._waiters = 0
        self._staging: Staging | None = None
        self._switching = asyncio.Lock()
        # Held by whoever reads or writes the staging memory.
        self._using = asyncio.Lock()
        self._totals = SubscriberStats(0, 0.0, 0, 0, 0, 0.0, None, None, None)

    def stats(self) -> SubscriberStats:
        pull = self._pull
        done = pull is not None and pull.done() and not _failed(pull)
        return msgspec.structs.replace(
            self._totals, pulling=None if done else self._version, staged=self._version if done else None
        )

    async def latest(self) -> int | None:
        """The latest announced version, or None."""
        value = await self._store.read(INDEX)
        return Index.decode(value).latest if value is not None else None

    async def prefetch(self, version: int, timeout: float | None = None) -> Staged:
        """Wait until `version` is published, stage it, and return it, within `timeout` (default: the subscriber's).

        A prefetch of the version that is being pulled, or is staged, joins it; one of another version supersedes it.
        """
        check_version(version)
        within = self._timeout if timeout is None else timeout
        check_seconds("timeout", within)
        async with self._switching:
            if self._version != version or self._pull is None or await self._outdated(version, self._pull):
                await self._stop()
                self._version = version
                self._pull = asyncio.create_task(self._stage(version), name=f"pull of version {version}")
            pull = self._pull
            self._waiters += 1
        try:
            async with asyncio.timeout(within):
                return await asyncio.shield(pull)
        except TimeoutError:
            latest = await self.latest()
            raise VersionTimeout(f"version {version} is not staged in time; latest is {latest}") from None
        except asyncio.CancelledError:
            if pull.cancelled() and self._pull is not pull:
                raise Superseded(f"version {version} was superseded by another prefetch") from None
            raise
        finally:
            if self._pull is pull:
                self._waiters -= 1
                if not self._waiters and not pull.done():
                    await self._stop()

    async def commit(self, staged: Staged, load: Load) -> Commit:
        """Hand every published name to `load` and return the digest of the bytes it was given.

        `load` runs in a thread, after all staged bytes are verified. If it has `check(metas)`, that is asked before
        anything is loaded, and raises if the version does not fit.
        """
        if self._needs is not None:
            raise BadTensor(f"version {staged.version} is staged in part; commit it with what asked for the parts")
        check_fits(staged.manifest.tensors, load)
        return await self.commit_with(staged, lambda: _load(staged, load))

    async def commit_with(self, staged: Staged, load: Callable[[], Awaitable[str]]) -> Commit:
        """Commit by other means: `load()` loads from `staged.staging`, which nobody writes meanwhile; the digest.

        Raises EngineRefused if that is not the digest of what was published.
        """
        async with self.using(staged):
            start = asyncio.get_running_loop().time()
            digest = await load()
            took = asyncio.get_running_loop().time() - start
        if digest != staged.manifest.digest:
            raise EngineRefused(f"version {staged.version}: loaded {digest}, published {staged.manifest.digest}")
        self._committed(staged.version, took)
        return Commit(staged.version, digest, took, staged.staging.array.size, len(staged.manifest.tensors))

    @asynccontextmanager
    async def using(self, staged: Staged) -> AsyncIterator[None]:
        """Inside, `staged` is what staging holds, and nobody writes there; raises Superseded if it is not.

        After an error what has changed there is forgotten, so that a prefetch brings it again.
        """
        self._check_current(staged)
        async with self._using:
            self._check_current(staged)
            try:
                yield
            except Exception:
                await in_thread(_forget_changed, staged)
                raise

    async def close(self) -> None:
        """Stop what is running and free the staging memory; the store stays open."""
        await self._stop()
        async with self._using:
            if self._staging is not None:
                self._staging.close()
                self._staging = None

    def _committed(self, version: int, seconds: float) -> None:
        totals = self._totals
        self._totals = msgspec.structs.replace(
            totals,
            commits=totals.commits + 1,
            exposed_seconds=totals.exposed_seconds + seconds,
            committed=version,
        )

    def _pulled(self, staged: Staged) -> Staged:
        totals = self._totals
        self._totals = msgspec.structs.replace(
            totals,
            pulls=totals.pulls + 1,
            pull_seconds=totals.pull_seconds + staged.seconds,
            wire_bytes=totals.wire_bytes + staged.wire_bytes,
        )
        return staged

    def _check_current(self, staged: Staged) -> None:
        pull = self._pull
        if pull is None or not pull.done() or _failed(pull) or pull.result() is not staged:
            raise Superseded(f"version {staged.version} is no longer staged; commit before you prefetch another")

    async def _outdated(self, version: int, pull: asyncio.Task[Staged]) -> bool:
        """Whether a pull has failed, staging has changed since, or the version is another one (after a rewind)."""
        if not pull.done() or _failed(pull):
            return pull.done()
        staged = pull.result()
        if any(staged.staging.content[index] is None for index in staged.ranges):
            return True
        manifest = await self._manifest(version)
        return manifest is not None and manifest.attempt != staged.manifest.attempt

    async def _stop(self) -> None:
        pull, self._pull, self._version, self._waiters = self._pull, None, None, 0
        if pull is not None:
            pull.cancel()
            await asyncio.wait([pull])
            _failed(pull)  # takes note of an error that nobody waits for any more

    async def _stage(self, version: int) -> Staged:
        manifest = await self._await_manifest(version)
        loop = asyncio.get_running_loop()
        start = loop.time()
        holds = await self._hold(version)
        try:
            plan = Plan(manifest.tensors, manifest.bucket_bytes)
            fetched = 0
            async with self._using:
                staging = self._fit(plan)
                ranges = self._needs(plan) if self._needs else whole(plan)
                steps = await self._steps(manifest, staging, list(ranges))

                async def stage(index: int) -> None:
                    nonlocal fetched
                    wire_bytes = await self._stage_bucket(steps, plan, staging, index, ranges[index])
                    fetched += wire_bytes

                await each(_IN_FLIGHT, ranges, stage)
            return self._pulled(Staged(manifest, plan, staging, loop.time() - start, fetched, ranges))
        except Missing as error:
            raise VersionGone(
                f"version {version} is removed, or being removed; latest is {await self.latest()} ({error})"
            ) from error
        finally:
            if holds:
                await self._store.delete(holds)

    async def _hold(self, version: int) -> list[str]:
        """Have retention wait; the keys to remove afterwards, none where there is no room or no right to write.

        Two subscribers may share a slot, and one end the hold of both: a removal is noticed anyway.
        """
        held = hold_key(version, int(self._id, 16) % HOLD_SLOTS)
        try:
            await self._store.put(held, [np.frombuffer(self._id.encode(), np.uint8)])
        except (StoreFull, StoreUnavailable):
            return []
        return [held]

    async def _await_manifest(self, version: int) -> Manifest:
        seen: bytes | None = None
        while True:
            if (manifest := await self._manifest(version)) is not None:
                return manifest
            if seen is not None and (latest := Index.decode(seen).latest) is not None and latest >= version:
                raise VersionGone(f"version {version} was skipped or removed; latest is {latest}")
            seen = await self._store.changed(INDEX, seen)

    async def _manifest(self, version: int) -> Manifest | None:
        key = manifest_key(version)
        data = await self._store.get(key)
        return None if data is None else Manifest.decode(data, repr(key))

    def _fit(self, plan: Plan) -> Staging:
        staging = self._staging
        if staging is None or (staging.array.size, len(staging.content)) != (plan.total, len(plan)):
            if staging is not None:
                staging.close()
            staging = self._staging = Staging(plan.total, len(plan))
        return staging

    async def _steps(self, manifest: Manifest, staging: Staging, buckets: Sequence[int]) -> list[Manifest]:
        """The version and the bases that its buckets need, newest first, back to what staging holds or an anchor."""
        steps = [manifest]
        while any(_chain(steps, staging.content[index], index) is None for index in buckets):
            base = steps[-1].base
            assert base is not None, "a manifest with a delta bucket has a base"
            step = await self._manifest(base)
            if step is None:
                raise Missing(f"the base {base} of version {steps[-1].version} is gone")
            steps.append(step)
        return steps

    async def _stage_bucket(
        self, steps: list[Manifest], plan: Plan, staging: Staging, index: int, ranges: list[tuple[int, int]]
    ) -> int:
        """Make staging hold the ranges of the bucket: by deltas on what is there, or on the last whole object."""
        chain = _chain(steps, staging.content[index], index)
        assert chain is not None, "the steps lead to every bucket"
        target, fetched = staging.array[plan.span(index)], 0
        for step in reversed(chain):
            bucket = step.buckets[index]
            staging.content[index] = None
            if not bucket.delta:
                for start, stop in ranges:
                    await self._fetch(step, index, start, target[start:stop])
                    fetched += stop - start
            elif bucket.wire_bytes:
                payload = np.empty(bucket.wire_bytes, np.uint8)
                await self._fetch(step, index, 0, payload)
                await in_thread(delta.apply, plan.runs()[index], target, payload)
                fetched += bucket.wire_bytes
        if chain and chain[0].buckets[index].delta:
            await in_thread(_check_outcome, steps[0], index, target, ranges)
        staging.content[index] = steps[0].buckets[index].digest
        return fetched

    async def _fetch(self, manifest: Manifest, index: int, start: int, buffer: Bytes) -> None:
        """Fill the buffer from the object's bytes at `start`, once more if they are not what was published."""
        key = manifest.key(index)
        for attempt in range(2):
            for first in range(0, buffer.size, _SLICE_BYTES):
                await self._store.get_into(key, start + first, buffer[first : first + _SLICE_BYTES])
            if await in_thread(is_published, manifest.buckets[index], start, buffer):
                return
            self._totals = msgspec.structs.replace(self._totals, refetched=self._totals.refetched + 1 - attempt)
        raise CorruptBucket(f"object {key!r} fails its checksum twice: publish version {manifest.version} again")


def _forget_changed(staged: Staged) -> None:
    manifest, staging = staged.manifest, staged.staging
    for index, ranges in staged.ranges.items():
        if not is_content(manifest.buckets[index], staging.array[staged.plan.span(index)], ranges):
            staging.content[index] = None


async def _load(staged: Staged, load: Load) -> str:
    """Verify the staged bytes, give them to `load` by name, and return their digest."""
    manifest, plan, content = staged.manifest, staged.plan, staged.staging.array
    shares = [dict(list(staged.ranges.items())[first::_IN_FLIGHT]) for first in range(_IN_FLIGHT)]
    await each(_IN_FLIGHT, shares, lambda share: in_thread(verify, manifest, plan, content, share))
    await in_thread(hand_over, plan, content, load)
    return manifest.digest


def _check_outcome(manifest: Manifest, index: int, target: Bytes, ranges: list[tuple[int, int]]) -> None:
    if not is_content(manifest.buckets[index], target, ranges):
        raise CorruptBucket(f"bucket {index} of version {manifest.version} is not what its deltas promise")


def _chain(steps: list[Manifest], content: str | None, index: int) -> list[Manifest] | None:
    """The versions, newest first, whose objects turn `content` into the bucket; None if it takes older ones."""
    for position, step in enumerate(steps):
        if step.buckets[index].digest == content:
            return steps[:position]
        if not step.buckets[index].delta:
            return steps[: position + 1]
    return None


def _failed(pull: asyncio.Task[Staged]) -> bool:
    return pull.done() and (pull.cancelled() or pull.exception() is not None)
