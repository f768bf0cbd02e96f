"""Prefill on one worker, decode on another: what takes time, what a death costs, and that nothing stays behind."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from msgspec.structs import replace

from llmproxy import (
    Aborted,
    AffinityRouter,
    GenerateRequest,
    GenerateResult,
    Interrupted,
    LLMProxy,
    Partial,
    ProxyConfig,
    SimWorker,
    Span,
)
from llmproxy.sim import Rates

FAST, SLOW = 1e3, 1e-3


def prefiller(id: str = "p", **options: object) -> SimWorker:
    given = {"hardware": "H800", "role": "prefill", "speed": Rates(100.0, SLOW, SLOW)} | options
    return SimWorker(id, **given)  # type: ignore[arg-type]


def decoder(id: str = "d", **options: object) -> SimWorker:
    """Takes a cache of 100 tokens in 0.1 s; would prefill them in 100,000 s."""
    given = {"hardware": "H20", "role": "decode", "speed": Rates(SLOW, 10.0, FAST, handoff=1_000.0)} | options
    return SimWorker(id, **given)  # type: ignore[arg-type]


def request(id: str = "t", tokens: int = 20) -> GenerateRequest:
    return GenerateRequest(id, [1] * 100, tokens, request_id=id)


def start(proxy: LLMProxy, asked: GenerateRequest) -> asyncio.Task[GenerateResult]:
    return asyncio.create_task(proxy.generate(asked))


def idle(proxy: LLMProxy, *workers: SimWorker) -> bool:
    stats = proxy.stats()
    live = stats.requests["queued"] + stats.requests["dispatched"]
    left = [one for one in stats.workers if one.charged or one.running or one.load]
    return not live and not left and all(worker.running == 0 == worker.pinned for worker in workers)


async def test_both_phases_are_accounted_for() -> None:
    p, d = prefiller(), decoder()
    proxy = LLMProxy([p, d])
    result = await proxy.generate(request())
    assert (result.worker, result.spans, result.logprobs) == ("d", [Span(0, 0, 20)], [-float(i) for i in range(20)])
    timing = result.timing
    assert (timing.prefill_worker, timing.attempts) == ("p", 1)
    assert timing.prefill == pytest.approx(1.0) and timing.running == pytest.approx(1.0 + 0.1 + 2.0)
    assert idle(proxy, p, d) and proxy.stats().unsplit == 0


async def test_a_later_turn_finds_its_prefix_at_both() -> None:
    p, d = prefiller(), decoder()
    proxy = LLMProxy([p, d, prefiller("q"), decoder("e")])
    first = await proxy.generate(request())
    later = GenerateRequest("t", [1] * 100 + first.token_ids + [2] * 30, 20)
    second = await proxy.generate(later)
    assert (second.worker, second.timing.prefill_worker) == (first.worker, first.timing.prefill_worker)
    assert second.timing.cached_tokens == 100
    assert second.timing.prefill == pytest.approx(0.5)  # the generated tokens and the new ones
    assert second.timing.running == pytest.approx(0.5 + 0.03 + 2.0)  # what the decode worker made is not sent


async def test_a_context_that_the_prefill_worker_lost_is_continued_where_it_is() -> None:
    """The prefill worker keeps one context, and two trajectories take turns: each finds its own gone."""
    p, d = prefiller(cache_tokens=0), decoder(speed=Rates(FAST, 10.0, FAST, handoff=1_000.0))
    proxy = LLMProxy([p, d])
    contexts = {id: [1] * 100 for id in ("s", "t")}
    where: dict[str, list[str]] = {"s": [], "t": []}
    for _ in range(4):
        for id in contexts:
            result = await proxy.generate(GenerateRequest(id, contexts[id], 20))
            where[id].append(result.timing.prefill_worker)
            contexts[id] = contexts[id] + result.token_ids + [2] * 30
    # The first turn is new, the second finds nothing left of it; from then on the decode worker has all of it.
    assert where == {"s": ["p", "p", "", ""], "t": ["p", "p", "", ""]}
    assert proxy.stats().local == 4 and idle(proxy, p, d)


async def test_many_new_tokens_are_prefilled_apart_even_then() -> None:
    p, d = prefiller(cache_tokens=0), decoder()
    proxy = LLMProxy([p, d, prefiller("q", cache_tokens=0)], config=ProxyConfig(short_prefill=29))
    context = [1] * 100
    for turn in range(3):
        await proxy.generate(GenerateRequest(f"s{turn}", [1] * 100, 1))
        result = await proxy.generate(GenerateRequest("t", context, 20))
        context = context + result.token_ids + [2] * 30
        assert result.timing.prefill_worker
    assert proxy.stats().local == 0


@pytest.mark.parametrize(("prefills", "decodes"), [(1, 3), (2, 2), (3, 1)])
async def test_pools_of_unequal_size_are_scheduled_by_load(prefills: int, decodes: int) -> None:
    ps = [prefiller(f"p{i}") for i in range(prefills)]
    ds = [decoder(f"d{i}") for i in range(decodes)]
    proxy = LLMProxy(
        [*ps, *ds], router=AffinityRouter(random=Random(0)), prefill_router=AffinityRouter(random=Random(1))
    )
    tasks = [start(proxy, request(f"t{i}")) for i in range(96)]
    await asyncio.sleep(0)
    running = {stats.id: stats.running for stats in proxy.stats().workers}
    for pool in (ps, ds):
        fair = 96 / len(pool)
        assert all(0.7 * fair <= running[worker.id] <= 1.3 * fair for worker in pool), running
    begun = asyncio.get_running_loop().time()
    results = await asyncio.gather(*tasks)
    assert {result.finish_reason for result in results} == {"length"} and idle(proxy, *ps, *ds)
    # Prefill is the bottleneck here, and its workers share it.
    assert asyncio.get_running_loop().time() - begun < 1.3 * 96 / prefills + 4.0


async def test_a_prefill_worker_that_dies_is_replaced() -> None:
    p, q, d = prefiller("p"), prefiller("q"), decoder()
    proxy = LLMProxy([p, d])
    task = start(proxy, request())
    await asyncio.sleep(0.5)
    proxy.add_worker(q)
    p.die()
    result = await task
    assert result.timing.prefill_worker == "q" and result.timing.attempts == 2 and idle(proxy, p, q, d)
    assert proxy.stats().lost == 1
    await proxy.close()


async def test_without_a_prefill_worker_the_decode_worker_does_it_all() -> None:
    p, d = prefiller(), decoder(speed=Rates(100.0, 10.0, FAST))
    proxy = LLMProxy([p, d])
    task = start(proxy, request())
    await asyncio.sleep(0.5)
    p.die()
    result = await task
    assert result.worker == "d" and result.timing.prefill_worker == "p" and proxy.stats().unsplit == 1
    assert idle(proxy, p, d)
    await proxy.close()


async def test_a_decode_worker_that_dies_during_prefill_leaves_nothing_at_the_prefill_worker() -> None:
    p, d, e = prefiller(), decoder(), decoder("e")
    proxy = LLMProxy([p, d], config=ProxyConfig(watch=0.2))
    task = start(proxy, request())
    await asyncio.sleep(0.1)
    proxy.add_worker(e)
    d.die()
    result = await task
    assert result.worker == "e" and idle(proxy, p, d, e)
    await proxy.close()


async def test_a_decode_worker_that_dies_is_continued_from_its_tokens() -> None:
    p, d, e = prefiller(), decoder(), decoder("e")
    proxy = LLMProxy([p, d])
    task = start(proxy, request())
    await asyncio.sleep(1.0 + 0.1 + 0.95)  # 9 tokens
    proxy.add_worker(e)
    d.die()
    result = await task
    assert result.worker == "e" and result.logprobs == [-float(i) for i in range(20)] and idle(proxy, p, d, e)
    # All of the context that the first prefill left is found; the 9 tokens are computed before the rest is made.
    assert result.timing.running == pytest.approx(2.05 + 0.09 + 0.109 + 1.1)
    await proxy.close()


async def test_a_prefill_worker_that_dies_before_its_cache_was_taken_costs_a_prefill() -> None:
    p, d = prefiller(), decoder(speed=Rates(50.0, 10.0, FAST, handoff=100.0))
    proxy = LLMProxy([p, d])
    task = start(proxy, request())
    await asyncio.sleep(1.5)
    assert p.pinned == 100
    p.die()
    result = await task
    assert result.worker == "d" and result.logprobs == [-float(i) for i in range(20)] and idle(proxy, p, d)
    await proxy.close()


@pytest.mark.parametrize("seconds", [0.5, 1.05, 1.5])
@pytest.mark.parametrize("how", ["abort", "interrupt", "cancel"])
async def test_ending_a_request_frees_both_workers_in_every_phase(seconds: float, how: str) -> None:
    p, d = prefiller(), decoder()
    proxy = LLMProxy([p, d])
    task = start(proxy, request())
    await asyncio.sleep(seconds)
    if how == "abort":
        assert await proxy.abort("t")
        expected: type[BaseException] = Aborted
    elif how == "interrupt":
        partial = await proxy.interrupt("t")
        assert partial is not None and len(partial.token_ids) == (4 if seconds == 1.5 else 0)
        expected = Interrupted
    else:
        task.cancel()
        expected = asyncio.CancelledError
    with pytest.raises(expected):
        await task
    await asyncio.sleep(1)
    assert idle(proxy, p, d)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("seconds", [0.5, 1.05, 1.5])
async def test_an_update_in_any_phase_uses_no_old_cache(seconds: float, keep: bool) -> None:
    p, d = prefiller(keep=keep), decoder(keep=keep, speed=Rates(100.0, 10.0, FAST, handoff=1_000.0))
    proxy = LLMProxy([p, d])
    task = start(proxy, request())
    await asyncio.sleep(seconds)
    await proxy.suspend()
    await proxy.update(1)
    await proxy.resume()
    result = await task
    made = 4 if seconds == 1.5 else 0
    assert result.spans == ([Span(0, 0, made)] if made else []) + [Span(1, made, 20)]
    assert result.logprobs == [-float(i) for i in range(20)] and idle(proxy, p, d)


async def test_a_decode_worker_takes_no_cache_of_other_weights() -> None:
    p, d = prefiller(), decoder()
    handoff = await p.prefill(request())
    await d.update(1)
    await d.resume()
    assert handoff is not None and p.pinned == 100
    assert await d.generate(replace(request(), handoff=handoff)) == Partial([], [], [], 20)
    assert p.pinned == 0


async def test_a_prefill_worker_with_old_weights_is_fenced() -> None:
    p, d = prefiller(), decoder(speed=Rates(100.0, 10.0, FAST, handoff=1_000.0))
    proxy = LLMProxy([p, d])
    await proxy.suspend()
    await proxy.update(1)
    await proxy.resume()
    p.rejoin(version=0)
    result = await proxy.generate(request())
    assert result.spans == [Span(1, 0, 20)] and proxy.stats().lost == 1 and p.pinned == 0
    await proxy.close()


async def test_a_cache_stays_where_it_was_computed_until_there_is_room_for_it() -> None:
    p, d = prefiller(), decoder(speed=Rates(SLOW, 10.0, FAST, handoff=1_000.0, capacity=200.0))
    proxy = LLMProxy([p, d])
    tasks = [start(proxy, request(f"t{i}")) for i in range(3)]
    await asyncio.sleep(3.5)  # the first decodes from 1.1 to 3.1, the others are computed
    assert tasks[0].done() and p.pinned == 100  # the second's was taken when the first had ended
    await asyncio.gather(*tasks)
    assert asyncio.get_running_loop().time() < 8.0  # none was computed again
    assert d.preemptions == 0 and idle(proxy, p, d)


async def test_prefill_stops_where_nobody_takes_what_it_computes() -> None:
    p = prefiller(speed=Rates(100.0, 10.0, FAST, capacity=350.0))
    d = decoder(speed=Rates(SLOW, 10.0, FAST, handoff=1_000.0, capacity=150.0))
    proxy = LLMProxy([p, d])
    tasks = [start(proxy, request(f"t{i}", 40)) for i in range(6)]
    await asyncio.sleep(4.9)  # the first decodes until 5.1; there is room for three more
    assert (p.pinned, p.backlog()) == (300, 200)
    await asyncio.gather(*tasks)
    assert d.preemptions == 0 and idle(proxy, p, d)


async def test_roles_need_their_methods() -> None:
    class Plain:
        id, hardware, role, version, context_limit = "x", "H800", "prefill", 0, 100

    with pytest.raises(ValueError, match="'prefill'"):
        LLMProxy([Plain()])  # type: ignore[list-item]
    proxy = LLMProxy([prefiller()])
    with pytest.raises(ValueError, match="taken"):
        proxy.add_worker(decoder("p"))
    proxy.remove_worker("p")
    assert proxy.stats().workers == []
