"""Prefill and decode in different vLLM engines, caches handed over by NIXL over TCP: two of each, real processes."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import warnings
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from msgspec.structs import replace
from tests.llmproxy.engines import FREE, Fleet, close_to, nothing_runs, prompts

from llmproxy import Aborted, GenerateRequest, GenerateResult, Handoff, LLMProxy, ProxyConfig, Sampling
from llmproxy.vllm import VLLMWorker

pytest.importorskip("nixl")
pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
    # vLLM's own sockets and contexts, closed when they are collected.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
GREEDY = Sampling(temperature=0.0, logprobs="processed", ignore_eos=True)
LENGTH = 200


class Pairs:
    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.prefills: list[VLLMWorker] = []
        self.decodes: list[VLLMWorker] = []

    @property
    def all(self) -> list[VLLMWorker]:
        return [*self.prefills, *self.decodes]

    async def check(self, asked: list[GenerateRequest], results: list[GenerateResult]) -> None:
        for request, result in zip(asked, results, strict=True):
            assert len(result.token_ids) == request.max_tokens
            expected = self.fleet.reference(request.prompt_ids, result.token_ids, result.spans)
            assert close_to(result.logprobs, expected)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pairs(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pairs]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    fleet = Fleet(tmp_path_factory.mktemp("models"))
    pairs = Pairs(fleet)
    for i in range(2):
        pairs.prefills.append(await fleet.start(f"p{i}", "prefill"))
    for i in range(2):  # the last engine's counters are those that can be read in this process
        pairs.decodes.append(await fleet.start(f"d{i}", "decode", disable_log_stats=False, served_model_name=f"d{i}"))
    yield pairs
    for worker in fleet.workers:
        await worker.close()
    fleet.workers.clear()
    with warnings.catch_warnings(action="ignore"):
        gc.collect()


def requests(count: int, tokens: int, seed: int, sampling: Sampling = FREE) -> list[GenerateRequest]:
    return [
        GenerateRequest(f"t{seed}-{i}", prompt, tokens, sampling=sampling)
        for i, prompt in enumerate(prompts(count, LENGTH, seed))
    ]


def sources(worker: VLLMWorker) -> dict[str, float]:
    """Where the engine says its prompt tokens came from."""
    from prometheus_client import REGISTRY

    counts = {}
    for metric in REGISTRY.collect():
        for sample in metric.samples:
            if sample.name == "vllm:prompt_tokens_by_source_total" and sample.labels["model_name"] == worker.id:
                counts[sample.labels["source"]] = sample.value
    return counts


async def at_rest(worker: VLLMWorker, seconds: float = 2.0) -> bool:
    """No request, and no cache kept for another engine."""
    async with asyncio.timeout(seconds):
        while not await nothing_runs(worker):  # noqa: ASYNC110 - an engine can only be asked
            await asyncio.sleep(0.05)
    return True


def engine_pid(worker: VLLMWorker) -> int:
    (process,) = worker._engine.engine_core.resources.engine_manager.processes
    return int(process.pid)


async def under_way(proxy: LLMProxy, asked: list[GenerateRequest]) -> list[asyncio.Task[GenerateResult]]:
    """Started; the first have tokens when this returns, and the last may still be prefilled."""
    tasks = [asyncio.create_task(proxy.generate(request)) for request in asked]
    await proxy.generate(GenerateRequest("pace", [9, 9], 5, sampling=FREE))
    return tasks


async def test_tokens_are_those_of_one_engine_and_the_decode_engine_computes_no_prompt(pairs: Pairs) -> None:
    p, d = pairs.prefills[0], pairs.decodes[1]
    proxy = LLMProxy([p, d])
    asked = requests(6, 20, seed=0, sampling=GREEDY)
    before = sources(d)
    apart = await asyncio.gather(*map(proxy.generate, asked))
    after = sources(d)
    taken = {source: after[source] - before.get(source, 0.0) for source in after}
    assert taken["external_kv_transfer"] == 6 * LENGTH and not taken.get("local_compute")
    assert await at_rest(p) and await at_rest(d)
    for request, one in zip(asked, apart, strict=True):
        whole = await p.generate(replace(request, request_id="whole"))
        assert isinstance(whole, GenerateResult)
        assert one.token_ids == whole.token_ids and close_to(one.logprobs, whole.logprobs)
        assert (one.worker, one.timing.prefill_worker) == ("d1", "p0")
        assert 0.0 < one.timing.prefill < one.timing.running
    assert proxy.stats().unsplit == 0
    await proxy.close()


async def test_sampled_tokens_have_the_policys_logprobs(pairs: Pairs) -> None:
    proxy = LLMProxy(pairs.all)
    asked = requests(24, 20, seed=1)
    results = await asyncio.gather(*map(proxy.generate, asked))
    await pairs.check(asked, results)
    assert {result.worker for result in results} == {"d0", "d1"}
    assert {result.timing.prefill_worker for result in results} == {"p0", "p1"}
    assert all([await at_rest(worker) for worker in pairs.all])
    await proxy.close()


async def test_what_ends_early_leaves_nothing_at_either_side(pairs: Pairs) -> None:
    p, d = pairs.prefills[0], pairs.decodes[0]
    (request,) = requests(1, 200, seed=2)
    handoff = await p.prefill(replace(request, request_id="a"))
    assert isinstance(handoff, Handoff) and not await nothing_runs(p)
    await d.release(handoff)
    assert await at_rest(p)

    handoff = await p.prefill(replace(request, request_id="b"))
    taking = asyncio.create_task(d.generate(replace(request, request_id="b", handoff=handoff)))
    await asyncio.sleep(0)
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    assert await at_rest(p) and await at_rest(d)

    proxy = LLMProxy([p, d])
    tasks = await under_way(proxy, requests(8, 300, seed=3))
    for i in range(8):
        assert await proxy.abort(f"t3-{i}")
    assert {type(error) for error in await asyncio.gather(*tasks, return_exceptions=True)} == {Aborted}
    assert await at_rest(p) and await at_rest(d)
    await proxy.close()


@pytest.mark.parametrize("round_", range(3))
async def test_an_update_finds_requests_in_every_phase(pairs: Pairs, round_: int) -> None:
    proxy = LLMProxy(pairs.all)
    version = proxy.stats().version
    asked = requests(24, 100, seed=10 + round_)
    tasks = await under_way(proxy, asked)
    await proxy.suspend()
    acks = await proxy.update(version + 1)
    assert not any(ack.error for ack in acks)
    await proxy.resume()
    results = await asyncio.gather(*tasks)
    await pairs.check(asked, results)
    seen = {tuple(span.version for span in result.spans) for result in results}
    assert seen <= {(version,), (version, version + 1), (version + 1,)} and len(seen) > 1
    assert not any(one.fenced for one in proxy.stats().workers) and proxy.stats().lost == 0
    assert all([await at_rest(worker) for worker in pairs.all])
    await proxy.close()


async def test_a_stopped_engine_loses_its_requests_in_time(pairs: Pairs) -> None:
    """SIGSTOP: it takes requests and never answers."""
    config = ProxyConfig(watch=1.0, answer=3.0)
    proxy = LLMProxy(pairs.all, config=config)
    asked = requests(12, 100, seed=20)
    tasks = await under_way(proxy, asked)
    pid = engine_pid(pairs.decodes[0])
    os.kill(pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(60):
            results = await asyncio.gather(*tasks)
        await pairs.check(asked, results)
        assert any(result.timing.attempts > 1 for result in results)
        fenced = {one.id: one.fenced for one in proxy.stats().workers}
        assert "did not answer" in fenced["d0"] and not fenced["d1"]
    finally:
        os.kill(pid, signal.SIGCONT)
    async with asyncio.timeout(60):
        while any(one.fenced for one in proxy.stats().workers):  # noqa: ASYNC110 - the proxy probes by itself
            await asyncio.sleep(0.1)
    assert all([await at_rest(worker, 20) for worker in pairs.all])
    await proxy.close()


@pytest.mark.parametrize("side", ["decode", "prefill"])
async def test_kill_minus_nine_of_either_side_loses_nothing(pairs: Pairs, side: str) -> None:
    pool = pairs.decodes if side == "decode" else pairs.prefills
    victim = pool[0]
    proxy = LLMProxy(pairs.all)
    asked = requests(24, 100, seed=30 if side == "decode" else 31)
    tasks = await under_way(proxy, asked)
    os.kill(engine_pid(victim), signal.SIGKILL)
    pool.remove(victim)
    async with asyncio.timeout(120):
        results = await asyncio.gather(*tasks)
    await pairs.check(asked, results)
    if side == "decode":
        assert any(result.timing.attempts > 1 for result in results)
    # A killed prefill engine is noticed when a request meets it.
    await asyncio.gather(*map(proxy.generate, requests(8, 5, seed=32)))
    fenced = {one.id: bool(one.fenced) for one in proxy.stats().workers}
    assert fenced.pop(victim.id) and not any(fenced.values())
    assert all([await at_rest(worker, 20) for worker in pairs.all])
    await proxy.close()
