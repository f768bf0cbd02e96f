"""One real embedded server for the directory, a namespace of its own for each test."""

import asyncio
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as redis

from resmgr import ResourceManager
from resmgr.embedded import EmbeddedServer

# So that the tests here share `tests.resmgr.kubernetes_server`.
ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)


@pytest.fixture(scope="session")
def socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    server = EmbeddedServer(tmp_path_factory.mktemp("store"))
    asyncio.run(server.ensure())
    yield server.socket_path
    asyncio.run(server.stop())


class Place:
    """The store under one namespace, with the faults that tests inject."""

    def __init__(self, socket: Path) -> None:
        self.url = f"unix://{socket}"
        self.namespace = uuid.uuid4().hex[:8]
        self.managers: list[ResourceManager] = []
        self.client = redis.Redis.from_url(self.url)

    async def connect(self, **options: Any) -> ResourceManager:
        manager = await ResourceManager.connect(self.url, namespace=self.namespace, **options)
        self.managers.append(manager)
        return manager

    async def raw(self, name: str, key: str, *rest: str | int) -> Any:
        command: Any = self.client.execute_command
        return await command(name, f"{{{self.namespace}}}:{key}", *rest)

    async def wipe(self) -> None:
        """The store restarts empty."""
        await self.client.delete(*[key async for key in self.client.scan_iter(f"{{{self.namespace}}}:*")])

    async def expire(self, session: str) -> None:
        """The lease of a session has ended, its manager does not know it yet."""
        await self.raw("ZREM", "leases", session)
        await self.raw("SADD", "dying", session)

    async def kill(self, manager: ResourceManager) -> None:
        """The manager's process is gone: no more heartbeats, no goodbye."""
        self.managers.remove(manager)
        runner = manager._runner
        assert runner is not None
        runner.cancel()
        await asyncio.wait([runner])
        await manager._store.close()


@pytest.fixture
async def place(socket: Path) -> AsyncIterator[Place]:
    place = Place(socket)
    yield place
    for manager in place.managers:
        await manager.close()
    await place.client.aclose()
