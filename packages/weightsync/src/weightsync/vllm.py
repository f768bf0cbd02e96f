"""Weights into a vLLM engine: `VLLMWeightLoader` stages versions on the host and has the engine load them.

The engine's process maps the staging memory, so bytes are copied once, by the engine itself. The caller pauses the
engine (mode "keep", cache cleared) around `load`, and resumes it only when `load` has returned
(`test_weightsync_vllm.py::test_twenty_updates_with_generations_in_flight`).
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable
from typing import Any

from weightsync.blocking import uninterrupted
from weightsync.errors import EngineRefused, Superseded, WeightSyncError
from weightsync.sharding import ShardedSubscriber
from weightsync.subscriber import Commit, Staged, Subscriber

__all__ = ["VLLMWeightLoader"]


class VLLMWeightLoader:
    """Feeds one engine (an `AsyncLLM`) from one subscriber, of one store or of those of all trainer ranks.

    `staged` (one for each store) and `commit` are the last of each, with their times. After a failed `load`, `broken`
    says why, `check` raises, and the engine must serve nothing until a `load` has succeeded.
    """

    def __init__(self, subscriber: Subscriber | ShardedSubscriber) -> None:
        self.staged: tuple[Staged, ...] = ()
        self.commit: Commit | None = None
        self.broken = ""
        self._subscriber = subscriber

    def engine_args(self) -> dict[str, Any]:
        """What the engine must be made with."""
        return {
            "worker_extension_cls": "weightsync.vllm_engine.Extension",
            "weight_transfer_config": {"backend": "weightsync"},
        }

    async def start(self, engine: Any) -> None:
        try:
            await engine.collective_rpc("weightsync_state")
        except Exception as error:
            raise EngineRefused("the engine lacks the weightsync extension: make it with engine_args()") from error

    async def prefetch(self, version: int) -> None:
        """Wait until the version is published and stage it, while the engine generates."""
        staged = await self._subscriber.prefetch(version)
        self.staged = (staged,) if isinstance(staged, Staged) else tuple(staged)

    async def load(self, engine: Any, version: int) -> str:
        """Load the staged version into the paused engine; the digest, computed there, of what it was given."""
        staged = self.staged
        if not staged or staged[0].version != version:
            raise Superseded(f"version {version} is not staged: prefetch it before load")
        self.broken = f"loading version {version} has not finished"
        try:
            self.commit = await self._committed(staged, lambda: _load(engine, staged))
        except WeightSyncError as error:
            self.broken = str(error)
            raise
        self.broken = ""
        return self.commit.digest

    def check(self) -> None:
        """Raise if the last load failed, and the engine may hold mixed weights."""
        if self.broken:
            raise EngineRefused(f"the engine holds no whole version: {self.broken}; load one")

    async def close(self) -> None:
        await self._subscriber.close()

    async def _committed(self, staged: tuple[Staged, ...], load: Callable[[], Awaitable[str]]) -> Commit:
        if isinstance(self._subscriber, ShardedSubscriber):
            return await self._subscriber.commit_with(staged, load)
        return await self._subscriber.commit_with(staged[0], load)


async def _load(engine: Any, staged: tuple[Staged, ...]) -> str:
    version = staged[0].version
    paths = [one.staging.path for one in staged]
    manifests = [base64.b64encode(one.manifest.encode()).decode() for one in staged]
    call = asyncio.ensure_future(engine.collective_rpc("weightsync_load", args=(paths, manifests)))
    try:
        # The engine reads the staging memory until the call ends, whatever becomes of its caller.
        states = await uninterrupted(call)
    except Exception as error:
        raise EngineRefused(f"the engine did not load version {version}: {error}") from error
    digests = {digest for _, digest, _ in states}
    if len(digests) != 1:
        raise EngineRefused(f"the engine's workers disagree on version {version}: {sorted(digests)}")
    await engine.update_weight_version(str(version))
    return str(digests.pop())
