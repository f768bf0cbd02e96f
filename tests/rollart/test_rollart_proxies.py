"""Several proxies over the same engines: all acknowledge, each engine loads once, a failing proxy is named."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter

import async_solipsism
import pytest

from llmproxy import Ack, GenerateRequest, GenerateResult, LLMProxy, ProxyConfig, SimWorker
from rollart.pipeline.proxies import Proxies, ProxyFailed


def virtual(test):
    """Run an async test on virtual time."""

    @functools.wraps(test)
    def run(**arguments):
        with asyncio.Runner(loop_factory=async_solipsism.EventLoop) as runner:
            runner.run(test(**arguments))

    return run


class Engine(SimWorker):
    """Counts what it is asked for."""

    def __init__(self, id: str) -> None:
        super().__init__(id, prefill_rate=1000.0, decode_rate=10.0)
        self.asked: Counter[str] = Counter()

    async def update(self, version: int) -> Ack:
        self.asked[f"update {version}"] += 1
        return await super().update(version)


class Slow(LLMProxy):
    """Acknowledges everything five seconds late."""

    async def suspend(self) -> None:
        await super().suspend()
        await asyncio.sleep(5)

    async def resume(self) -> None:
        await super().resume()
        await asyncio.sleep(5)


class Failing(LLMProxy):
    """Cannot suspend."""

    async def suspend(self) -> None:
        raise OSError("its host is gone")


def request(number: int, tokens: int = 60) -> GenerateRequest:
    return GenerateRequest(f"t{number}", [1] * 10, tokens)


def start(proxies: Proxies, count: int) -> list[asyncio.Task[GenerateResult]]:
    return [asyncio.create_task(proxies.generate(request(number))) for number in range(count)]


@virtual
async def test_an_update_reaches_every_proxy_and_each_engine_once() -> None:
    engines = [Engine("a"), Engine("b")]
    members = [LLMProxy(engines), Slow(engines), LLMProxy(engines)]
    proxies = Proxies(members)
    running = start(proxies, 24)
    await asyncio.sleep(1)
    assert all(proxy.stats().workers[0].running + proxy.stats().workers[1].running for proxy in members)
    clock = asyncio.get_running_loop().time
    began = clock()
    await proxies.suspend()
    assert clock() - began >= 5, "it waits for the slow one"
    assert all(proxy.stats().suspended for proxy in members)
    acks = await proxies.update(1)
    assert {ack.worker: ack.version for ack in acks} == {"a": 1, "b": 1}
    assert [proxy.version for proxy in members] == [1, 1, 1]
    assert all(proxy.stats().suspended for proxy in members), "no gate opens before all hold the version"
    await proxies.resume()
    assert not any(proxy.stats().suspended for proxy in members)
    results = [await task for task in running]
    assert all(len(result.token_ids) == 60 for result in results)
    assert {tuple(span.version for span in result.spans) for result in results} == {(0, 1)}
    assert [engine.asked for engine in engines] == [Counter({"update 1": 1})] * 2
    await proxies.close()


@virtual
async def test_a_trajectory_stays_with_its_proxy_and_all_proxies_have_some() -> None:
    members = [LLMProxy([Engine("a")]) for _ in range(3)]
    proxies = Proxies(members)
    for _ in range(2):
        await asyncio.gather(*start(proxies, 30))
    served = [proxy.stats().requests["admitted"] for proxy in members]
    assert sum(served) == 60 and all(count and count % 2 == 0 for count in served)
    await proxies.close()


@virtual
async def test_a_failing_proxy_is_named_after_the_others_have_been_heard() -> None:
    engine = Engine("a")
    members = [Slow([engine]), Failing([engine])]
    proxies = Proxies(members)
    with pytest.raises(ProxyFailed, match="proxy-1 did not suspend: OSError: its host is gone") as failure:
        await proxies.suspend()
    assert failure.value.proxy == "proxy-1"
    assert members[0].stats().suspended
    assert not engine.asked
    await proxies.close()


@virtual
async def test_a_silent_proxy_is_named() -> None:
    engine = Engine("a")
    proxies = Proxies([LLMProxy([engine]), Slow([engine])], patience_s=2)
    with pytest.raises(ProxyFailed, match="proxy-1 did not suspend: no acknowledgement in 2 s"):
        await proxies.suspend()
    await proxies.close()


@virtual
async def test_an_engine_that_cannot_load_is_fenced_in_every_proxy_and_comes_back() -> None:
    engines = [Engine("a"), Engine("b")]
    engines[1].failing_updates = 1
    members = [LLMProxy(engines, config=ProxyConfig(probe_first=0.1)) for _ in range(2)]
    proxies = Proxies(members)
    await proxies.suspend()
    acks = await proxies.update(1)
    assert [bool(ack.error) for ack in acks] == [False, True]
    assert [[bool(worker.fenced) for worker in proxy.stats().workers] for proxy in members] == [[False, True]] * 2
    await proxies.resume()
    await asyncio.sleep(30)
    assert not any(worker.fenced for proxy in members for worker in proxy.stats().workers)
    await proxies.close()


@virtual
async def test_an_update_that_no_engine_takes_names_the_proxy_that_made_it() -> None:
    engine = Engine("a")
    engine.failing_updates = 1
    proxies = Proxies([LLMProxy([engine]), LLMProxy([engine])])
    await proxies.suspend()
    with pytest.raises(ProxyFailed, match="proxy-0 did not update to version 1: UpdateFailed"):
        await proxies.update(1)
    await proxies.close()


@virtual
async def test_engines_that_are_all_lost_during_an_update_are_waited_for() -> None:
    """The processes die while they load, and one is back later."""
    engines = [Engine("a"), Engine("b")]
    for engine in engines:
        engine.update_time = 2.0
    members = [LLMProxy(engines, config=ProxyConfig(probe_first=0.1)) for _ in range(2)]
    proxies = Proxies(members)
    running = start(proxies, 8)
    await asyncio.sleep(1)
    await proxies.suspend()
    update = asyncio.create_task(proxies.update(1))
    await asyncio.sleep(1)
    for engine in engines:
        engine.die()
    await asyncio.sleep(30)
    assert not update.done()
    engines[1].rejoin()
    acks = await update
    assert [(ack.worker, ack.lost) for ack in acks] == [("a", True), ("b", False)]
    await proxies.resume()
    results = [await task for task in running]
    assert {(result.worker, len(result.token_ids)) for result in results} == {("b", 60)}
    engines[0].rejoin()
    await asyncio.sleep(30)
    assert not any(worker.fenced for proxy in members for worker in proxy.stats().workers)
    await proxies.close()


@virtual
async def test_an_engine_that_hangs_in_an_update_is_fenced_and_the_others_go_on() -> None:
    """With the bounds as they are by default: nobody gives the proxy up before it gives the engine up."""
    engines = [Engine("a"), Engine("b")]
    proxies = Proxies([LLMProxy(engines) for _ in range(2)])
    await proxies.suspend()
    engines[0].freeze()
    acks = await proxies.update(1)
    assert [(ack.worker, bool(ack.error)) for ack in acks] == [("a", True), ("b", False)]
    await proxies.resume()
    assert {result.worker for result in await asyncio.gather(*start(proxies, 8))} == {"b"}
    await proxies.close()


@virtual
async def test_the_only_engine_may_be_silent_for_a_while_whenever_it_is_asked() -> None:
    for when in ("suspend", "update", "resume"):
        engine = Engine("a")
        proxies = Proxies([LLMProxy([engine]) for _ in range(2)])
        running = start(proxies, 4)
        await asyncio.sleep(1)
        for step in (proxies.suspend, functools.partial(proxies.update, 1), proxies.resume):
            if when in str(step):
                engine.freeze()
                asyncio.get_running_loop().call_later(100, engine.thaw)
            await step()
        assert [len((await task).token_ids) for task in running] == [60] * 4
        await proxies.close()


@virtual
async def test_engines_that_stay_lost_end_the_update_and_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine("a")
    engine.die()
    proxies = Proxies([LLMProxy([engine])], patience_s=100)
    await proxies.suspend()
    with pytest.raises(ProxyFailed, match=r"proxy-0 did not update to version 1: .* worker a is lost"):
        await proxies.update(1)
    assert asyncio.get_running_loop().time() == pytest.approx(100)
    assert caplog.text.count("asking again") == 1
    await proxies.close()
