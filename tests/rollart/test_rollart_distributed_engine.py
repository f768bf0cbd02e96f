"""A RayWorker's process dies, is silent or comes back at the moments between its calls, in virtual time."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import async_solipsism
import pytest

from llmproxy.errors import WorkerLost
from llmproxy.values import Ack
from rollart.distributed import WorkerDied, WorkerInfo
from rollart.distributed.ray_worker import RayWorker
from rollart.distributed.wire import Description


def virtual(test):
    """Run an async test on virtual time."""

    @functools.wraps(test)
    def run():
        with asyncio.Runner(loop_factory=async_solipsism.EventLoop) as runner:
            runner.run(test())

    return run


class Process:
    """A cluster's member as a RayWorker sees it; a start anew takes ten seconds. `log` is what its engine did."""

    def __init__(self) -> None:
        self.info = WorkerInfo(name="gen-0", role="gen")
        self.death: WorkerDied | None = None
        self.settled = asyncio.Event()
        self.settled.set()
        self.ended = False
        self.silent = False
        self.deaths = 0
        self.dies_after = ""
        self.log: list[str] = []
        self._gone = asyncio.Event()

    def kill(self, reason: str, *, for_good: bool = False) -> None:
        self.death = WorkerDied(self.info, reason, "")
        self.deaths += 1
        self.settled.clear()
        self._gone.set()
        self._gone = asyncio.Event()
        if for_good:
            self.ended = True
            self.settled.set()
        else:
            asyncio.get_running_loop().call_later(10, self._up)

    def _up(self) -> None:
        self.death, self.silent = None, False
        self.settled.set()

    async def call(self, method: str, *args: Any) -> Any:
        if self.death is not None:
            raise self.death
        work = asyncio.create_task(self._answer(method, *args))
        gone = asyncio.create_task(self._gone.wait())
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                assert self.death is not None
                raise self.death
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.wait((work, gone))
        if method == self.dies_after:
            self.dies_after = ""
            self.kill("killed")
        return work.result()

    async def _answer(self, method: str, *args: Any) -> Any:
        while self.silent:  # noqa: ASYNC110
            await asyncio.sleep(1)
        if method == "connect":  # the line is another matter
            self.log.append(method)
            await asyncio.get_running_loop().create_future()
        if method == "describe":
            return Description("both", 0, 128)
        what, *versions = args
        if what in ("prefetch", "update"):
            self.log.append(f"{what} {versions[0]}")
            await asyncio.sleep(5)
            self.log.append(f"{what} {versions[0]} done")
        return Ack("gen-0", versions[0], "digest") if what == "update" else 0


def worker(process: Process) -> RayWorker:
    return RayWorker(process, patience_s=100.0)  # type: ignore[arg-type]


@virtual
async def test_a_process_that_is_being_started_anew_is_waited_for() -> None:
    process = Process()
    process.kill("killed while the trainer still started")
    engine = worker(process)
    await engine.start()
    assert (engine.version, asyncio.get_running_loop().time()) == (0, 10)
    await engine.close()
    process.kill("killed once too often", for_good=True)
    with pytest.raises(WorkerLost, match="once too often"):
        await worker(process).start()


@virtual
async def test_a_death_between_two_calls_ends_no_exchange() -> None:
    process = Process()
    process.dies_after = "describe"
    engine = worker(process)
    await engine.start()
    assert process.death is not None
    await asyncio.sleep(11)
    assert process.log == ["connect"], "it connects with the process that came back"
    process.kill("killed", for_good=True)
    await asyncio.sleep(1)
    with pytest.raises(WorkerLost, match="killed"):
        await engine.probe()
    await engine.close()


@virtual
async def test_one_version_at_a_time_is_staged_or_loaded() -> None:
    """The proxy mends an engine that came back while the next version is staged on it."""
    process = Process()
    engine = worker(process)
    acks = await asyncio.gather(engine.update(3), engine.prefetch(4), engine.update(3))
    assert acks[0] == acks[2] == Ack("gen-0", 3, "digest")
    assert process.log == ["prefetch 4", "prefetch 4 done", "update 3", "update 3 done"]


@virtual
async def test_a_load_gives_way_to_that_of_the_next_version() -> None:
    process = Process()
    engine = worker(process)
    mending = asyncio.create_task(engine.update(3))
    await asyncio.sleep(1)
    assert await engine.update(4) == Ack("gen-0", 4, "digest")
    assert process.log == ["update 3", "update 4", "update 4 done"] and engine.version == 4
    with pytest.raises(WorkerLost, match="version 3 was given up"):
        await mending


@virtual
async def test_a_silent_process_is_ended() -> None:
    process = Process()
    engine = worker(process)
    await engine.start()
    await asyncio.sleep(1000)
    assert process.deaths == 0
    process.silent = True
    with pytest.raises(WorkerLost, match="said nothing for 100 s"):
        await engine.prefetch(1)
    assert asyncio.get_running_loop().time() < 1000 + 130
    await asyncio.sleep(11)
    assert (process.deaths, process.death) == (1, None)
    await engine.prefetch(1)
    process.silent = True
    await asyncio.sleep(60)
    process.silent = False
    await asyncio.sleep(1000)
    assert process.deaths == 1, "who answers in time lives on"
    await engine.close()
