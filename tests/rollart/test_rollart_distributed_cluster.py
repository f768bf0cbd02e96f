"""A cluster on a real local Ray: modes, errors, order, cancellation, deaths and restarts."""

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rollart.distributed import (
    ActorOptions,
    Cluster,
    Layout,
    NotRunning,
    RaySession,
    RemoteError,
    Worker,
    WorkerDied,
    hw_mapping,
    register,
)

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]


class Computed(Exception):
    """An exception whose constructor is not that of its message."""

    def __init__(self, code: int, *, where: str) -> None:
        super().__init__(f"code {code} at {where}")
        self.code = code


class Actor(Worker):
    def __init__(self, tag: str = "") -> None:
        self.tag = f"{tag}{self.rank}"
        self.started: list[str] = []
        self.cancelled = 0

    def setup(self) -> None:
        print(f"{self.info.name} is set up", flush=True)

    @register("execute_all")
    def who(self, suffix: str = "") -> str:
        """Says which worker it is."""
        return self.tag + suffix

    @register("execute_rank_zero")
    def first(self) -> int:
        return self.rank

    @register("round_robin")
    async def one(self) -> int:
        return self.rank

    @register("dp_dispatch")
    def double(self, batch: list[int], *, factor: int) -> list[int]:
        return [factor * x for x in batch]

    @register("execute_all")
    def pid(self) -> int:
        return os.getpid()

    @register("execute_all")
    def thread(self) -> str:
        time.sleep(0.01)
        return threading.current_thread().name

    @register("execute_rank_zero")
    def fail(self) -> None:
        raise Computed(7, where="here")

    @register("execute_all")
    async def fail_on(self, rank: int) -> None:
        if self.rank == rank:
            raise ValueError("only here")
        await self.wait("other")

    @register("execute_rank_zero")
    async def wait(self, name: str) -> None:
        self.started.append(name)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.cancelled += 1

    @register("execute_all")
    async def waits(self) -> tuple[int, int]:
        return len(self.started), self.cancelled


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def session() -> AsyncIterator[RaySession]:
    async with RaySession() as session:
        import ray.cloudpickle

        # Workers do not import the tests.
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        yield session


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(session: RaySession, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    options = ActorOptions(logs=tmp_path_factory.mktemp("logs"))
    async with Cluster(Actor, size=2, options=options, tag="w") as cluster:
        yield cluster


async def test_modes_choose_workers_and_keep_order(pair: Cluster) -> None:
    assert await pair.who() == ["w0", "w1"]
    assert await pair.who(suffix="!") == ["w0!", "w1!"]
    assert await pair.first() == 0
    assert sorted([await pair.one(), await pair.one()]) == [0, 1]
    assert await pair.double([1, 2, 3], factor=2) == [2, 4, 6]
    assert await asyncio.to_thread(pair.who().result, 30) == ["w0", "w1"]
