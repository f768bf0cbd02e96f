"""One real embedded server for the directory, a namespace of its own for each test."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as redis

from resmgr import ResourceManager
from resmgr.embedded import EmbeddedServer

Connect = Callable[..., Awaitable[ResourceManager]]


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

    async def connect(self, **options: Any) -> ResourceManager:
        manager = await ResourceManager.connect(self.url, namespace=self.namespace, **options)
        self.managers.append(manager)
        return manager

    async def raw(self, *command: str | int) -> Any:
        async with redis.Redis.from_url(self.url) as client:
            name, key, *rest = command
            return await client.execute_command(name, f"{{{self.namespace}}}:{key}", *rest)

    async def keys(self) -> list[str]:
        async with redis.Redis.from_url(self.url) as client:
            return [key.decode() async for key in client.scan_iter(f"{{{self.namespace}}}:*")]

    async def wipe(self) -> None:
        """The store restarts empty."""
        async with redis.Redis.from_url(self.url) as client:
            await client.delete(*await self.keys())

    async def pass_time(self, seconds: float) -> None:
        """Moves the lease clock, which is data."""
        await self.raw("HINCRBY", "meta", "clock", int(seconds * 1000))

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
