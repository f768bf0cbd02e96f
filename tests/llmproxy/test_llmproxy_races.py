"""What comes between: steps that are given up, workers that are silent meanwhile, requests that moved first."""

from __future__ import annotations

import asyncio

import pytest
from tests.llmproxy.simulated import now, request, serving, start, worker

from llmproxy import (
    LLMProxy,
    ProxyConfig,
    SimWorker,
    Span,
    WrongState,
)


class Slow(SimWorker):
    """Takes its time to answer an interrupt, during which it may die."""

    async def interrupt(self, request_id: str) -> None:
        await asyncio.sleep(20)


@pytest.mark.parametrize("answer", [30.0, 10.0])
async def test_a_request_that_moved_by_itself_stays_where_it_went(answer: float) -> None:
    """Its old worker is still being asked for it, or does not answer at all."""
    old, other = Slow("old", prefill_rate=100.0, decode_rate=10.0), worker("other")
    proxy = LLMProxy([old], config=ProxyConfig(answer=answer, probe_first=1e6, probe_every=1e6))
    task = start(proxy, request(tokens=600))
    await asyncio.sleep(2.05)
    proxy.add_worker(other)
    proxy.lose(proxy.workers()[0], "for a test")
    await asyncio.sleep(0.1)  # it has been asked to hand the request back
    old.die()
    result = await task
    assert result.timing.attempts == 2 and result.worker == "other"
    assert result.token_ids == [0] * 600
    await proxy.close()


async def test_a_reclaim_leaves_alone_what_has_gone_before_it_began() -> None:
    asked: list[str] = []

    class Asked(SimWorker):
        async def interrupt(self, request_id: str) -> None:
            asked.append(self.id)
            await super().interrupt(request_id)

    old, other = (Asked(id, prefill_rate=100.0, decode_rate=10.0) for id in ("old", "other"))
    proxy = LLMProxy([old])
    task = start(proxy, request())
    await asyncio.sleep(2.05)
    proxy.add_worker(other)
    proxy.remove_worker("old")
    old.die()  # the reclaim lists the request, which then goes, and asks next
    assert (await task).worker == "other" and "other" not in asked
    await proxy.close()


async def test_a_request_that_waited_is_watched_when_it_goes_out() -> None:
    silent, other = worker("silent"), worker("other")
    config = ProxyConfig(watch=10.0, answer=5.0, patience=100.0)
    proxy = LLMProxy([], config=config)
    task = start(proxy, request())
    await asyncio.sleep(25)  # the watch has looked, and found nothing out
    proxy.add_worker(silent)
    await asyncio.sleep(1.5)
    silent.freeze()
    proxy.add_worker(other)
    begun = now()
    assert (await task).worker == "other" and now() - begun < 20
    silent.thaw()
    await proxy.close()


async def test_a_check_that_was_stopped_before_it_began_is_not_the_last() -> None:
    silent = worker("silent")
    proxy = LLMProxy([silent], config=ProxyConfig(watch=10.0, answer=5.0))
    task = start(proxy, request(tokens=1_000))
    await asyncio.sleep(5)
    proxy._watch._look()
    await proxy.suspend()
    await proxy.resume()
    silent.freeze()
    await asyncio.sleep(20)
    assert "no answer" in proxy.stats().workers[0].fenced or "did not answer" in proxy.stats().workers[0].fenced
    silent.thaw()
    await task
    await proxy.close()


async def test_a_worker_that_is_silent_while_it_loads_keeps_what_it_has(caplog: pytest.LogCaptureFixture) -> None:
    class Loading(SimWorker):
        async def probe(self) -> int | None:
            while self.version is None:  # noqa: ASYNC110 - it is silent
                await asyncio.sleep(1)
            return await super().probe()

    one = Loading("w", prefill_rate=100.0, decode_rate=10.0, update_time=300.0)
    proxy = LLMProxy([one])
    task = start(proxy, request())
    await asyncio.sleep(2)
    await proxy.suspend()
    update = asyncio.create_task(proxy.update(1))
    late = start(proxy, request("late"))
    await update
    await proxy.resume()
    assert (await task).timing.attempts == 1 and (await late).spans == [Span(1, 0, 20)] and not caplog.records
    await proxy.close()


# Steps that their callers give up.


async def test_an_update_that_is_given_up_lets_nobody_serve_until_another_succeeds() -> None:
    workers = [worker("a", update_time=1.0), worker("b", update_time=50.0)]
    proxy = LLMProxy(workers)
    task = start(proxy, request())
    await asyncio.sleep(1.5)
    await proxy.suspend()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(5):
            await proxy.update(1)
    with pytest.raises(WrongState, match="update again"):
        await proxy.resume()
    assert proxy.stats().suspended and not task.done()
    await proxy.update(2)
    await proxy.resume()
    result = await task
    assert {span.version for span in result.spans} == {0, 2} and result.timing.attempts == 1
    await proxy.close()


async def test_nobody_opens_the_gate_while_an_update_is_under_way() -> None:
    one = worker(update_time=50.0)
    proxy = LLMProxy([one])
    await proxy.suspend()
    update = asyncio.create_task(proxy.update(1))
    task = start(proxy, request())
    await asyncio.sleep(5)
    resume = asyncio.create_task(proxy.resume())  # as whoever lost patience with the update does in the end
    await asyncio.sleep(5)
    assert not one.running and proxy.stats().requests["queued"] == 1
    assert [ack.error for ack in await update] == [""]
    await resume
    assert (await task).spans == [Span(1, 0, 20)]
    await proxy.close()


async def test_a_gate_that_opened_before_an_update_began_is_noticed() -> None:
    class Hesitant(SimWorker):
        async def pause(self) -> None:
            await asyncio.sleep(5)
            await super().pause()

    one = Hesitant("w", prefill_rate=100.0, decode_rate=10.0)
    proxy = LLMProxy([one])
    suspend = asyncio.create_task(proxy.suspend())
    await asyncio.sleep(1)
    resume = asyncio.create_task(proxy.resume())  # waits for the suspend
    await asyncio.sleep(1)
    update = asyncio.create_task(proxy.update(1))
    await asyncio.gather(suspend, resume)
    with pytest.raises(WrongState, match="suspend first"):
        await update
    assert one.version == 0 and serving(proxy) == ["w"]
    assert (await proxy.generate(request())).spans == [Span(0, 0, 20)]
    await proxy.close()


async def test_a_suspend_after_a_resume_that_waits_has_the_last_word() -> None:
    one = worker(update_time=5.0)
    proxy = LLMProxy([one])
    task = start(proxy, request())
    await proxy.suspend()
    update = asyncio.create_task(proxy.update(1))
    await asyncio.sleep(1)
    resume = asyncio.create_task(proxy.resume())
    await asyncio.sleep(1)
    await proxy.suspend()
    assert proxy.stats().suspended and resume.done() and not (await update)[0].error
    await asyncio.sleep(100)
    assert not task.done()
    await proxy.resume()
    assert (await task).spans == [Span(1, 0, 20)]
    await proxy.close()


async def test_a_suspend_that_is_given_up_leaves_nobody_fenced_for_ever() -> None:
    one = worker("b")
    proxy = LLMProxy([worker("a"), one])
    one.die()
    proxy.lose(proxy.workers()[1], "for a test")
    await asyncio.sleep(1)
    suspend = asyncio.create_task(proxy.suspend())
    await asyncio.sleep(0)  # it is ending what mends
    suspend.cancel()
    await asyncio.gather(suspend, return_exceptions=True)
    one.rejoin(version=0)
    await proxy.resume()
    await asyncio.sleep(30)
    assert serving(proxy) == ["a", "b"]
    await proxy.close()


async def test_a_closed_proxy_mends_nobody() -> None:
    one = worker()
    proxy = LLMProxy([one])
    slot = proxy.workers()[0]
    await proxy.close()
    proxy.lose(slot, "for a test")
    await proxy.resume()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_an_acknowledgement_proves_nothing_of_a_worker_that_came_in_place_of_another() -> None:
    proxy = LLMProxy([worker("a"), worker("b")])
    await proxy.suspend()
    update = asyncio.create_task(proxy.update(1))
    await asyncio.sleep(0.5)
    proxy.remove_worker("b")
    other = worker("b", update_time=5.0)
    proxy.add_worker(other)
    assert [ack.error for ack in await update] == ["", ""]
    assert serving(proxy) == ["a"]
    await proxy.resume()
    await asyncio.sleep(10)
    assert serving(proxy) == ["a", "b"] and other.version == 1
    await proxy.close()


# Workers that are silent.


async def test_a_worker_known_to_be_silent_delays_no_update() -> None:
    silent = worker("b")
    proxy = LLMProxy([worker("a"), silent], config=ProxyConfig(answer=5.0, update=600.0))
    silent.freeze()
    begun = now()
    await proxy.suspend()
    acks = {ack.worker: ack.error for ack in await proxy.update(1)}
    assert now() - begun < 15.0
    assert acks == {"a": "", "b": "TimeoutError: no answer in 5 s"}
    await proxy.resume()
    silent.thaw()
    await asyncio.sleep(30)
    assert serving(proxy) == ["a", "b"] and silent.version == 1
    await proxy.close()


async def test_a_silent_worker_does_not_hold_up_a_prefetch() -> None:
    silent = worker("b")
    proxy = LLMProxy([worker("a"), silent], config=ProxyConfig(update=60.0))
    silent.freeze()
    acks = {ack.worker: ack.error for ack in await proxy.prefetch(1)}
    assert acks == {"a": "", "b": "TimeoutError: no answer in 60 s"} and now() < 61.0
    silent.thaw()
    await proxy.close()


async def test_a_workers_own_timeout_keeps_its_words() -> None:
    class Hasty(SimWorker):
        async def prefetch(self, version: int) -> None:
            raise TimeoutError("the store is slow")

    assert [ack.error for ack in await LLMProxy([Hasty("w")]).prefetch(1)] == ["TimeoutError: the store is slow"]
