"""The weight stores of a run, one for each rank of the trainer: in Mooncake over TCP, or in shared memory where
Mooncake cannot run.

The stores live as long as the context and leave nothing behind; with `auto` one clear line says when the second
choice was taken, and why (tests/rollart/test_rollart_store.py).
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from rollart.config.schema import WeightsConfig
from weightsync import SharedMemoryStore
from weightsync.errors import StoreUnavailable

_SHM = "shm:"

log = logging.getLogger(__name__)


@asynccontextmanager
async def weight_stores(config: WeightsConfig, ranks: int) -> AsyncIterator[tuple[str, ...]]:
    """URLs of stores that this process owns. Raises StoreUnavailable when `mooncake` is asked for in vain."""
    if config.store != "shm":
        from weightsync.mooncake_master import MooncakeMaster

        master = MooncakeMaster(segment_bytes=config.segment_mb << 20)
        try:
            await master.start()
        except StoreUnavailable as error:
            if config.store == "mooncake":
                raise
            log.warning("weights go through shared memory, not Mooncake: %s", error)
        else:
            try:
                yield tuple(master.url(f"weights-{rank}") for rank in range(ranks))
            finally:
                await master.stop()
            return
    name = f"rollart-{os.getpid()}-{secrets.token_hex(4)}"
    stores = [SharedMemoryStore(f"{name}-{rank}") for rank in range(ranks)]
    try:
        yield tuple(f"{_SHM}{name}-{rank}" for rank in range(ranks))
    finally:
        for store in stores:
            with suppress(FileNotFoundError):  # a Ray session that owned its folder has removed it
                store.unlink()


def folders_of(stores: Sequence[str]) -> list[Path]:
    """The folders that stay when the process of `weight_stores` is killed."""
    return [SharedMemoryStore(url.removeprefix(_SHM)).folder for url in stores if url.startswith(_SHM)]
