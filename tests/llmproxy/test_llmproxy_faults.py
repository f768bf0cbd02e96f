"""Workers that die, fall silent, flap, refuse, err, start slowly: nothing is lost, made twice or by wrong weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

import pytest
from tests.llmproxy.simulated import now, request, worker

from llmproxy import (
    AffinityRouter,
    GenerateRequest,
    GenerateResult,
    InvalidRequest,
    LLMProxy,
    Partial,
    ProxyConfig,
    SimWorker,
    WorkerLost,
)


class Erring(SimWorker):
    """Answers as told: `refuse` as a server that finds the request wrong (4xx), `err` as one that is broken (5xx)."""

    refuse = err = 0

    async def generate(self, request: GenerateRequest) -> GenerateResult | Partial:
        if self.refuse:
            self.refuse -= 1
            raise InvalidRequest("prompt_ids", "is not to its taste", "something else")
        if self.err:
            self.err -= 1
            raise WorkerLost(self.id, "internal server error")
        return await super().generate(request)


async def test_requests_of_a_silent_worker_move_in_bounded_time() -> None:
    silent, other = worker("a"), worker("b")
    config = ProxyConfig(watch=10.0, answer=5.0)
    proxy = LLMProxy([silent], config=config)
    tasks = [asyncio.create_task(proxy.generate(request(f"t{i}"))) for i in range(5)]
    await asyncio.sleep(0.5)
    proxy.add_worker(other)
    silent.freeze()
    frozen = now()
    for result in await asyncio.gather(*tasks):
        assert result.worker == "b" and result.logprobs == [-float(i) for i in range(20)]
    # Prefilling five prompts takes 5 s, and the last one decodes for 2 s.
    assert now() - frozen < config.watch + config.answer + 7.1
    fenced = {one.id: one.fenced for one in proxy.stats().workers}
    assert "did not answer" in fenced["a"] and not fenced["b"]
    silent.thaw()
    await asyncio.sleep(60)
    assert not any(one.fenced for one in proxy.stats().workers) and silent.running == 0
    await proxy.close()


async def test_a_worker_that_restarted_unnoticed_is_found_while_its_requests_hang() -> None:
    """The process is new and answers, but nobody ever told those who wait for the old one."""

    class Forgetful(SimWorker):
        async def generate(self, request: GenerateRequest) -> GenerateResult | Partial:
            await asyncio.Event().wait()
            raise AssertionError

    sly = Forgetful("a", version=1)
    proxy = LLMProxy([sly])
    task = asyncio.create_task(proxy.generate(request()))
    await asyncio.sleep(1)
    proxy.add_worker(worker("b", version=1))
    sly.rejoin(version=0)
    assert (await task).worker == "b" and now() < 50.0
    await proxy.close()


async def test_the_watch_rests_when_nothing_is_out_and_while_suspended() -> None:
    probes: list[float] = []

    class Counting(SimWorker):
        async def probe(self) -> int | None:
            probes.append(now())
            return await super().probe()

    proxy = LLMProxy([Counting("w", prefill_rate=100.0, decode_rate=10.0)])
    await proxy.generate(request())
    await asyncio.sleep(1_000)
    assert not probes
    task = asyncio.create_task(proxy.generate(request(tokens=300)))
    await asyncio.sleep(15)
    assert len(probes) == 1
    await proxy.suspend()
    await asyncio.sleep(1_000)
    assert len(probes) == 1
    await proxy.resume()
    await task
    assert len(probes) == 2
    await proxy.close()


async def test_a_storm_of_refusals_is_the_callers_and_fences_nobody() -> None:
    one = Erring("w")
    one.refuse = 200
    proxy = LLMProxy([one])
    answers = await asyncio.gather(*(proxy.generate(request(f"t{i}")) for i in range(200)), return_exceptions=True)
    assert {type(answer) for answer in answers} == {InvalidRequest}
    assert not proxy.stats().workers[0].fenced and proxy.stats().lost == 0
    await proxy.generate(request())


async def test_a_worker_that_probes_well_but_errs_is_tried_ever_more_rarely() -> None:
    good, bad = Erring("a"), Erring("b")
    bad.err = 1_000_000
    proxy = LLMProxy([good, bad], router=AffinityRouter(random=Random(0)))
    for i in range(2_000):
        assert (await proxy.generate(request(f"t{i}", 1))).worker == "a"
    # Each turn takes 25 ms: without backing off every second one would meet it.
    assert 1_000_000 - bad.err < 60
    bad.err = 0
    await asyncio.sleep(15)
    await asyncio.gather(*(proxy.generate(request(f"u{i}", 1)) for i in range(20)))
    assert not any(one.fenced for one in proxy.stats().workers)
    await proxy.close()


async def test_a_slow_start_is_waited_for() -> None:
    class Starting(SimWorker):
        async def probe(self) -> int | None:
            if now() < 40.0:
                raise WorkerLost(self.id, "refuses connections")
            return await super().probe()

    slow = Starting("w")
    slow._engine.version = None  # what is not up yet holds no known version
    proxy = LLMProxy([slow], version=0)
    task = asyncio.create_task(proxy.generate(request()))
    await asyncio.sleep(39)
    slow._engine.version = 0
    assert (await task).timing.queued > 40.0
    await proxy.close()


WORKERS = 8
TRAJECTORIES = 1_000
TURNS = 2


class Storm:
    """Faults on a schedule drawn once; every worker is healthy in the end."""

    def __init__(self, workers: list[Erring], proxy: LLMProxy, seed: int) -> None:
        self.workers = workers
        self.proxy = proxy
        self.random = Random(seed)
        self.version = 0
        self.ended = False

    async def run(self) -> None:
        faults: list[Callable[[Erring], object]] = [self._kill, self._freeze, self._refuse, self._err, self._restart]
        for _ in range(60):
            await asyncio.sleep(self.random.expovariate(0.5))
            await self._flap(self.workers[0])
            self.random.choice(faults)(self.random.choice(self.workers[1:]))
            if self.random.random() < 0.3:
                await self._update()
        self.ended = True
        for one in self.workers:
            self._heal(one)

    def _kill(self, one: Erring) -> None:
        one.die()
        asyncio.get_running_loop().call_later(self.random.uniform(1, 20), self._heal, one)

    def _freeze(self, one: Erring) -> None:
        one.freeze()
        asyncio.get_running_loop().call_later(self.random.uniform(1, 60), one.thaw)

    def _refuse(self, one: Erring) -> None:
        one.refuse += 20

    def _err(self, one: Erring) -> None:
        one.err += 10

    def _restart(self, one: Erring) -> None:
        one.rejoin(version=0)

    async def _flap(self, one: Erring) -> None:
        for _ in range(4):
            one.die()
            await asyncio.sleep(0.2)
            one.rejoin(version=0)
            await asyncio.sleep(0.2)

    def _heal(self, one: Erring) -> None:
        if one._dead:
            one.rejoin(version=0)

    async def _update(self) -> None:
        await self.proxy.suspend()
        self.version += 1
        await self.proxy.update(self.version)
        await self.proxy.resume()


async def play(proxy: LLMProxy, storm: Storm, name: str, random: Random) -> int:
    """One trajectory of several turns; refusals are for the caller to try again. How often it was refused."""
    context = [1] * random.randint(20, 200)
    refused = 0
    for _ in range(TURNS):
        asked = GenerateRequest(name, context, random.randint(1, 60))
        since = storm.version
        while True:
            try:
                result = await proxy.generate(asked)
                break
            except InvalidRequest:
                refused += 1
        told = [span.version for span in result.spans for _ in range(span.start, span.end)]
        assert result.token_ids == told and len(told) == asked.max_tokens
        assert result.logprobs == [-float(i) for i in range(asked.max_tokens)]
        assert told == sorted(told) and all(since <= version <= storm.version for version in told)
        context = [*context, *result.token_ids, *[2] * random.randint(0, 30)]
        await asyncio.sleep(random.expovariate(1.0))
    return refused


@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
async def test_nothing_is_lost_under_all_faults_together(seed: int) -> None:
    workers = [
        Erring(
            f"w{i}",
            hardware=f"class{i % 2}",
            prefill_rate=2_000.0,
            decode_rate=20.0,
            decode_total=400.0,
            keep=i % 3 != 0,
            tells_partial=i % 4 != 1,
        )
        for i in range(WORKERS)
    ]
    config = ProxyConfig(attempts=40, patience=1e6, watch=5.0, answer=5.0, update=30.0)
    router = AffinityRouter({"default": "class0"}, saturation=20_000, random=Random(seed))
    proxy = LLMProxy(workers, router=router, config=config)
    storm = Storm(workers, proxy, seed)
    raging = asyncio.create_task(storm.run())
    random = Random(seed)
    refused = await asyncio.gather(*(play(proxy, storm, f"t{i}", random) for i in range(TRAJECTORIES)))
    await raging
    stats = proxy.stats()
    assert stats.requests["finished"] == TRAJECTORIES * TURNS
    assert stats.requests["failed"] == sum(refused) > 0 and stats.requests["aborted"] == 0
    assert stats.lost > 100 and storm.version > 5
    assert all(one.charged == one.running == one.load == 0 for one in stats.workers)
    await proxy.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}
