"""Suspend, update, resume: what runs is kept or handed back, who fails is fenced, half a fleet never serves."""

from __future__ import annotations

import asyncio

import pytest
from tests.llmproxy.simulated import request, serving, start, worker

from llmproxy import (
    Ack,
    LLMProxy,
    ProxyConfig,
    SimWorker,
    Span,
    UpdateFailed,
    WrongState,
)


async def roll(proxy: LLMProxy, version: int) -> list[Ack]:
    await proxy.suspend()
    acks = await proxy.update(version)
    await proxy.resume()
    return acks


@pytest.mark.parametrize("keep", [True, False])
async def test_generations_under_way_go_on_under_the_new_version(keep: bool) -> None:
    workers = [worker("a", keep=keep), worker("b", keep=keep)]
    proxy = LLMProxy(workers)
    tasks = [start(proxy, request(f"t{i}")) for i in range(4)]
    await asyncio.sleep(4)
    assert [ack.error for ack in await roll(proxy, 1)] == ["", ""]
    for task in tasks:
        result = await task
        assert len(result.token_ids) == 20 and result.logprobs == [-float(i) for i in range(20)]
        assert [span.version for span in result.spans] in ([0, 1], [0], [1])
    assert proxy.stats().version == 1


async def test_a_long_update_is_not_taken_for_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    proxy = LLMProxy([worker("a", update_time=300.0, keep=True)], config=ProxyConfig(watch=10.0))
    task = start(proxy, request("t", 200))
    await asyncio.sleep(4)
    await proxy.suspend()
    update = asyncio.create_task(proxy.update(1))
    waiting = start(proxy, request("u"))
    await asyncio.sleep(100)  # the watch looked ten times
    assert serving(proxy) == ["a"] and not caplog.records
    await update
    await proxy.resume()
    assert [span.version for span in (await task).spans] == [0, 1] and await waiting


async def test_no_token_is_made_between_suspend_and_resume() -> None:
    proxy = LLMProxy([worker()])
    task = start(proxy, request())
    await asyncio.sleep(1.95)
    await proxy.suspend()
    await asyncio.sleep(1_000)
    partial = await proxy.interrupt("t")
    assert partial is not None and partial.spans == [Span(0, 0, 9)]
    await proxy.resume()
    assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], Exception)


async def test_what_comes_while_suspended_runs_wholly_under_the_new_version() -> None:
    proxy = LLMProxy([worker()])
    await proxy.suspend()
    tasks = [start(proxy, request(f"t{i}")) for i in range(3)]
    await asyncio.sleep(1)
    await proxy.update(5)
    await proxy.resume()
    assert {tuple((await task).spans) for task in tasks} == {(Span(5, 0, 20),)}


async def test_update_needs_suspend() -> None:
    proxy = LLMProxy([worker()])
    with pytest.raises(WrongState, match="suspend"):
        await proxy.update(1)
    assert proxy.stats().version == 0


async def test_prefetch_reaches_every_worker_and_tells_who_could_not() -> None:
    alive, dead = worker("a"), worker("b")
    dead.die()
    acks = await LLMProxy([alive, dead]).prefetch(3)
    assert alive.staged == {3}
    assert [(ack.worker, bool(ack.error)) for ack in acks] == [("a", False), ("b", True)]


async def test_a_worker_that_fails_is_fenced_moved_from_and_brought_up_to_date() -> None:
    good, bad = worker("a"), worker("b")
    bad.failing_updates = 2
    proxy = LLMProxy([good, bad])
    tasks = [start(proxy, request(f"t{i}", 40)) for i in range(6)]
    await asyncio.sleep(4)
    assert bad.running > 0
    acks = {ack.worker: ack.error for ack in await roll(proxy, 1)}
    assert acks["a"] == "" and "told to fail" in acks["b"]
    assert serving(proxy) == ["a"] and bad.version is None
    for task in tasks:
        result = await task
        assert result.worker == "a" and len(result.token_ids) == 40
        assert result.logprobs == [-float(i) for i in range(40)]
        assert {span.version for span in result.spans} <= {0, 1}
    assert serving(proxy) == ["a", "b"] and bad.version == 1
    await proxy.close()


async def test_all_or_nothing_when_so_configured() -> None:
    good, bad = worker("a"), worker("b")
    bad.failing_updates = 1
    proxy = LLMProxy([good, bad], config=ProxyConfig(on_failure="fail"))
    task = start(proxy, request())
    await asyncio.sleep(1.5)
    await proxy.suspend()
    with pytest.raises(UpdateFailed, match="b: UpdateFailed") as caught:
        await proxy.update(1)
    assert [ack.worker for ack in caught.value.failures] == ["b"]
    with pytest.raises(WrongState, match="update again"):
        await proxy.resume()
    await asyncio.sleep(100)
    assert not task.done() and proxy.stats().suspended and proxy.stats().version == 0
    await proxy.update(1)
    await proxy.resume()
    assert [span.version for span in (await task).spans] == [0, 1]


async def test_a_failed_worker_can_be_given_up() -> None:
    good, bad = worker("a"), worker("b")
    bad.failing_updates = 100
    proxy = LLMProxy([good, bad], config=ProxyConfig(on_failure="fail"))
    tasks = [start(proxy, request(f"t{i}", 60)) for i in range(6)]
    await asyncio.sleep(4)
    await proxy.suspend()
    with pytest.raises(UpdateFailed):
        await proxy.update(1)
    proxy.remove_worker("b")
    await proxy.update(1)
    await proxy.resume()
    for task in tasks:
        assert len((await task).token_ids) == 60
    assert serving(proxy) == ["a"]


@pytest.mark.parametrize("config", [ProxyConfig(), ProxyConfig(on_failure="fail")])
async def test_when_nobody_holds_the_version_the_update_fails(config: ProxyConfig) -> None:
    bad = worker()
    bad.failing_updates = 1
    proxy = LLMProxy([bad], config=config)
    await proxy.suspend()
    with pytest.raises(UpdateFailed):
        await proxy.update(1)
    assert proxy.stats().suspended
    await proxy.update(1)
    await proxy.resume()
    assert (await proxy.generate(request())).spans == [Span(1, 0, 20)]


async def test_a_wrong_acknowledgement_is_a_failure() -> None:
    class Liar(SimWorker):
        async def update(self, version: int) -> Ack:
            return Ack(self.id, version - 1)

    proxy = LLMProxy([worker("a"), Liar("b")])
    await roll(proxy, 1)
    assert serving(proxy) == ["a"]
    await proxy.close()


async def test_a_worker_that_hangs_in_the_update_is_fenced_in_time() -> None:
    hung = worker("b", update_time=1e6)
    proxy = LLMProxy([worker("a"), hung], config=ProxyConfig(update=60.0))
    before = asyncio.get_running_loop().time()
    acks = {ack.worker: ack.error for ack in await roll(proxy, 1)}
    assert asyncio.get_running_loop().time() - before < 61.0
    assert acks["a"] == "" and "TimeoutError" in acks["b"] and serving(proxy) == ["a"]
    await proxy.close()


async def test_a_restarted_worker_serves_only_after_it_caught_up() -> None:
    old = worker("old")
    proxy = LLMProxy([worker("a")], version=0)
    await roll(proxy, 7)
    proxy.add_worker(old)
    assert serving(proxy) == ["a"]
    results = [await proxy.generate(request(f"t{i}", 1)) for i in range(20)]
    assert {span.version for result in results for span in result.spans} == {7}
    assert old.version == 7 and serving(proxy) == ["a", "old"]
    await proxy.close()


async def test_a_worker_ahead_of_the_fleet_waits_for_it() -> None:
    ahead = worker("ahead", version=3)
    proxy = LLMProxy([worker("a"), ahead], version=0)
    await asyncio.sleep(100)
    assert serving(proxy) == ["a"] and ahead.version == 3
    await proxy.suspend()
    proxy.accept(3, [await one.update(3) for one in (worker("a"), ahead)])
    assert serving(proxy) == ["a", "ahead"]
    await proxy.close()


async def test_a_worker_that_joins_during_an_update_does_not_fail_it() -> None:
    proxy = LLMProxy([worker("a")], config=ProxyConfig(on_failure="fail"))
    await proxy.suspend()
    update = asyncio.create_task(proxy.update(1))
    await asyncio.sleep(0.5)
    late = worker("late")
    proxy.add_worker(late)
    await update
    assert serving(proxy) == ["a"]
    await proxy.resume()
    await asyncio.sleep(10)
    assert serving(proxy) == ["a", "late"] and late.version == 1
    await proxy.close()


async def test_a_worker_that_dies_while_paused_loses_nothing() -> None:
    first, second = worker("a"), worker("b")
    proxy = LLMProxy([first, second])
    tasks = [start(proxy, request(f"t{i}")) for i in range(6)]
    await asyncio.sleep(4)
    await proxy.suspend()
    first.die()
    await asyncio.sleep(1)
    await proxy.update(1)
    await proxy.resume()
    for task in tasks:
        assert (await task).logprobs == [-float(i) for i in range(20)]
    first.rejoin(version=0)
    await asyncio.sleep(60)
    assert serving(proxy) == ["a", "b"] and first.version == 1
    await proxy.close()


async def test_mending_rests_while_suspended() -> None:
    """The controller alone touches weights then: a catch-up could undo what it is doing."""
    flaky = worker("b", update_time=50.0)
    proxy = LLMProxy([worker("a"), flaky])
    await roll(proxy, 1)
    flaky.die()
    flaky.rejoin(version=0)
    task = start(proxy, request())
    await task
    proxy.remove_worker("b")
    proxy.add_worker(flaky)  # fenced at version 0, being brought to 1
    await asyncio.sleep(10)
    await proxy.suspend()
    await asyncio.sleep(100)
    assert flaky.version is None
    acks = await proxy.update(2)
    assert {ack.error for ack in acks} == {""} and flaky.version == 2
    await proxy.resume()
    await proxy.close()


async def test_two_proxies_over_the_same_workers_update_them_once() -> None:
    workers = [worker("a"), worker("b")]
    proxies = [LLMProxy(workers), LLMProxy(workers)]
    tasks = [start(proxy, request(f"{i}")) for i, proxy in enumerate(proxies * 4)]
    await asyncio.sleep(3)
    await asyncio.gather(*(proxy.suspend() for proxy in proxies))
    acks = await proxies[0].update(1)
    proxies[1].accept(1, acks)
    await asyncio.gather(*(proxy.resume() for proxy in proxies))
    for task in tasks:
        assert (await task).logprobs == [-float(i) for i in range(20)]
    assert [proxy.stats().version for proxy in proxies] == [1, 1]


async def test_a_worker_that_restarted_unnoticed_is_caught_by_its_answer() -> None:
    """Nothing failed at the proxy, yet the weights are old: the answer is thrown away and made again."""
    sly = worker("sly")
    proxy = LLMProxy([sly])
    await roll(proxy, 1)
    sly.rejoin(version=0)
    result = await proxy.generate(request())
    assert result.spans == [Span(1, 0, 20)] and result.timing.attempts == 2
    await proxy.close()
