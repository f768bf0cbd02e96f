"""Stores of every kind, and a Mooncake master for the session."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from weightsync import MemoryStore, SharedMemoryStore, Store, open_store
from weightsync.mooncake_master import MooncakeMaster


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def mooncake() -> AsyncIterator[MooncakeMaster]:
    async with MooncakeMaster(segment_bytes=96 << 20) as master:
        yield master


@pytest.fixture(params=["shm", "file", pytest.param("mooncake", marks=pytest.mark.real)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a store that several processes can open is, or will be."""
    if request.param == "mooncake":
        master: MooncakeMaster = request.getfixturevalue("mooncake")
        return master.url(uuid.uuid4().hex)
    return f"shm:test-{uuid.uuid4().hex}" if request.param == "shm" else f"file:{tmp_path}"


@pytest.fixture
async def shared(url: str) -> AsyncIterator[Store]:
    store = open_store(url)
    yield store
    await store.close()
    if isinstance(store, SharedMemoryStore):
        store.unlink()


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore()
