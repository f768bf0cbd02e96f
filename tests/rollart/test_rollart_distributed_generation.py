"""llmproxy workers in Ray actors: batches, order, cancellation, typed errors, deaths."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from ray.exceptions import OutOfMemoryError

from llmproxy.errors import Aborted, InvalidRequest, UpdateFailed, WorkerLost
from llmproxy.values import Ack, GenerateRequest, GenerateResult, Partial, Span
from llmproxy.worker import Role
from llmproxy.worker import Worker as Engine
from rollart.distributed import ActorOptions, Cluster, RaySession, RemoteError, WorkerDied, WorkerInfo
from rollart.distributed.generation import GenerationHost
from rollart.distributed.ray_worker import RayWorker, ray_workers

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]

ENDLESS = 0


class Scripted:
    """Answers with the prompt reversed; a prompt of ENDLESS ends only when it is told to."""

    def __init__(self, info: WorkerInfo) -> None:
        self.id = info.name
        self.hardware = info.hardware
        self.role: Role = "decode"
        self.version: int | None = 3
        self.context_limit = 77
        self.running: dict[str, asyncio.Future[str]] = {}
        self.log: list[str] = []
        self.dead = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> GenerateResult | Partial:
        if request.max_tokens > self.context_limit:
            raise InvalidRequest("max_tokens", f"is {request.max_tokens}", f"at most {self.context_limit}")
        tokens = request.prompt_ids[::-1]
        if request.prompt_ids == [ENDLESS]:
            end = self.running[request.request_id] = asyncio.get_running_loop().create_future()
            try:
                how = await end
            except asyncio.CancelledError:
                self.log.append(f"cancelled {request.request_id}")
                raise
            if how == "cancel":
                raise asyncio.CancelledError
            if how == "abort":
                raise Aborted(request.request_id)
            return Partial(tokens, [-1.0], [Span(3, 0, 1)], request.max_tokens - 1)
        return GenerateResult(tokens, [-1.0] * len(tokens), [Span(3, 0, len(tokens))], "stop", self.id)

    async def abort(self, request_id: str) -> None:
        self.running[request_id].set_result("abort")

    async def interrupt(self, request_id: str) -> None:
        self.running[request_id].set_result("interrupt")

    async def fail(self, request_id: str) -> None:
        self.running[request_id].set_result("cancel")

    async def pause(self) -> None:
        self.log.append("pause")

    async def resume(self) -> None:
        self.log.append("resume")

    async def prefetch(self, version: int) -> None:
        self.log.append(f"prefetch {version}")

    async def update(self, version: int) -> Ack:
        if version == 13:
            raise UpdateFailed(version, [Ack(self.id, version, error="unlucky")])
        self.log.append(f"update {version}")
        self.version = version
        return Ack(self.id, version, "digest")

    async def probe(self) -> int | None:
        return self.version

    async def history(self) -> tuple[int, list[str]]:
        return os.getpid(), self.log

    async def die(self) -> None:
        """As a process of the engine's may, and leave this call without an answer."""
        self.dead.set()
        await asyncio.get_running_loop().create_future()

    async def ended(self) -> None:
        await self.dead.wait()

    async def close(self) -> None:
        pass


async def make(info: WorkerInfo) -> Scripted:
    return Scripted(info)


def request(*prompt: int, id: str = "r", max_tokens: int = 8) -> GenerateRequest:
    return GenerateRequest(id, list(prompt), max_tokens, request_id=id)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[Cluster]:
    async with RaySession():
        import ray.cloudpickle

        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        async with Cluster(GenerationHost, role="gen", make=make, options=ActorOptions(restarts=1)) as cluster:
            yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def worker(cluster: Cluster) -> AsyncIterator[RayWorker]:
    (worker,) = ray_workers(cluster)
    await worker.start()
    yield worker
    await worker.close()


async def history(cluster: Cluster) -> tuple[int, list[str]]:
    pid, log = await cluster.members[0].call("control", "history")
    return pid, log


async def under_way(worker: RayWorker, *ids: str) -> list[asyncio.Task[GenerateResult | Partial]]:
    """Endless generations that the engine has begun: what was posted later has come back."""
    tasks = [asyncio.ensure_future(worker.generate(request(ENDLESS, id=id))) for id in ids]
    await asyncio.sleep(0)
    await worker.generate(request(1, id="after"))
    return tasks


async def test_it_is_a_worker_of_the_proxy(worker: RayWorker) -> None:
    engine: Engine = worker
    assert (engine.id, engine.hardware, engine.role, engine.version, engine.context_limit) == (
        "gen-0",
        "cpu",
        "decode",
        3,
        77,
    )


async def test_requests_travel_in_batches(worker: RayWorker) -> None:
    results = await asyncio.gather(*(worker.generate(request(i, i + 1, id=f"r{i}")) for i in range(200)))
    assert [result.token_ids for result in results] == [[i + 1, i] for i in range(200)]
    stats = worker.stats()
    assert stats.commands == stats.answers == 200 and stats.in_flight == 0
    assert stats.sent <= 3 and stats.received <= 20


async def test_an_abort_never_overtakes_its_request(worker: RayWorker) -> None:
    """The engine would not know the request: it raises KeyError then."""
    ends = [asyncio.ensure_future(worker.generate(request(ENDLESS, id=f"r{i}"))) for i in range(20)]
    await asyncio.sleep(0)
    await asyncio.gather(*(worker.abort(f"r{i}") for i in range(20)))
    assert all(isinstance(e, Aborted) for e in await asyncio.gather(*ends, return_exceptions=True))


async def test_an_interrupt_returns_what_there_is(worker: RayWorker) -> None:
    (task,) = await under_way(worker, "r")
    await worker.interrupt("r")
    assert await task == Partial([ENDLESS], [-1.0], [Span(3, 0, 1)], 7)


async def test_cancelling_frees_the_engine(worker: RayWorker, cluster: Cluster) -> None:
    first, second = await under_way(worker, "c1", "c2")
    first.cancel()
    await asyncio.wait([first])
    await worker.generate(request(1, id="after"))
    assert (await history(cluster))[1] == ["cancelled c1"]
    await worker.abort("c2")
    with pytest.raises(Aborted):
        await second


async def test_a_request_that_the_engine_cancels_is_lost(worker: RayWorker, cluster: Cluster) -> None:
    (task,) = await under_way(worker, "r")
    await cluster.members[0].call("control", "fail", "r")
    with pytest.raises(WorkerLost, match="its engine cancelled"):
        await task


async def test_a_new_client_gets_no_answers_of_the_last(worker: RayWorker, cluster: Cluster) -> None:
    """It takes over at once, though the last one's call for answers may still be under way."""
    (task,) = await under_way(worker, "old")
    (new,) = ray_workers(cluster)
    await new.start()
    results = await asyncio.gather(*(new.generate(request(i, 7, id=f"n{i}")) for i in range(1, 50)))
    assert [result.token_ids for result in results] == [[7, i] for i in range(1, 50)]
    assert (await history(cluster))[1][-1] == "cancelled old"
    await new.close()
    await worker.close()
    with pytest.raises(WorkerLost):
        await task


async def test_a_broken_line_loses_what_was_under_way_and_is_made_anew(worker: RayWorker, cluster: Cluster) -> None:
    """The process lives on, and is told that nobody waits any more."""
    (task,) = await under_way(worker, "broken")
    worker._line.close()
    with pytest.raises(WorkerLost, match="its line broke"):
        await task
    assert (await worker.generate(request(1, 2))).token_ids == [2, 1]
    assert (await history(cluster))[1][-1] == "cancelled broken"


async def test_errors_keep_their_type_and_fields(worker: RayWorker) -> None:
    with pytest.raises(InvalidRequest, match="max_tokens: is 99; must be at most 77") as caught:
        await worker.generate(request(1, max_tokens=99))
    assert caught.value.field == "max_tokens"
    with pytest.raises(KeyError):
        await worker.abort("nobody")
    with pytest.raises(UpdateFailed, match="unlucky") as failed:
        await worker.update(13)
    assert failed.value.failures == [Ack("gen-0", 13, error="unlucky")]
    assert isinstance(failed.value.__cause__, RemoteError) and "raise UpdateFailed" in failed.value.__cause__.trace
    assert worker.version is None


async def test_control_calls_reach_the_engine(worker: RayWorker, cluster: Cluster) -> None:
    await worker.prefetch(4)
    await worker.pause()
    assert await worker.update(4) == Ack("gen-0", 4, "digest")
    await worker.resume()
    assert worker.version == 4 == await worker.probe()
    assert (await history(cluster))[1][-4:] == ["prefetch 4", "pause", "update 4", "resume"]
    both = await asyncio.gather(worker.update(5), worker.update(5))
    assert list(both) == [Ack("gen-0", 5, "digest")] * 2
    assert (await history(cluster))[1].count("update 5") == 1, "who asks meanwhile shares the load"


async def test_a_process_ends_with_its_engine_and_is_started_anew(cluster: Cluster, tmp_path: Path) -> None:
    options = ActorOptions(restarts=1, logs=tmp_path)
    async with Cluster(GenerationHost, role="frail", make=make, options=options) as frail, asyncio.timeout(30):
        (member,), (worker,) = frail.members, ray_workers(frail)
        await worker.start()
        (task,) = await under_way(worker, "r")
        with pytest.raises(WorkerDied, match="frail-0: its engine has died"):
            await member.call("control", "die")
        with pytest.raises(WorkerLost):
            await task
        await member.settled.wait()
        assert await worker.probe() == 3 and member.restarts == 1
        await worker.close()


async def test_a_process_that_ray_ends_for_want_of_memory_is_dead_and_started_anew(cluster: Cluster) -> None:
    """Ray says so in an error of another type, without the actor's name: who was called counts."""
    want = OutOfMemoryError("low on memory")
    async with Cluster(GenerationHost, role="large", make=make, options=ActorOptions(restarts=2)) as large:
        (member,) = large.members
        references = [member.submit("serve", 0), member.submit("serve", 0)]
        assert isinstance(died := member.translated(want, "serve", references[0]), WorkerDied)
        assert died is member.death and died.reason == "low on memory"
        await member.settled.wait()
        assert member.translated(want, "serve", references[1]) is died
        assert member.death is None and member.restarts == 1, "a late word of the first death ends nobody"


async def test_death_loses_all_requests(worker: RayWorker, cluster: Cluster) -> None:
    """Nothing hangs; the restarted process serves again, with a version that has yet to be asked for."""
    tasks = await under_way(worker, *(f"r{i}" for i in range(10)))
    async with asyncio.timeout(30):
        os.kill((await history(cluster))[0], signal.SIGKILL)
        lost = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(error, WorkerLost) and error.worker == "gen-0" for error in lost)
        with pytest.raises(WorkerLost):
            await worker.generate(request(1))
        assert worker.version is None and worker.stats().in_flight == 0
        await cluster.members[0].settled.wait()
        assert await worker.probe() == 3
        assert (await worker.generate(request(1, 2))).token_ids == [2, 1]
        os.kill((await history(cluster))[0], signal.SIGKILL)
        await cluster.died
        with pytest.raises(WorkerLost):
            await worker.probe()
