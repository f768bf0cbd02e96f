"""A request's life: placed, waiting, lost, moved, interrupted, aborted, cancelled; always ended exactly once."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace
from tests.llmproxy.simulated import request, start, worker

from llmproxy import (
    Aborted,
    AffinityRouter,
    Closed,
    DuplicateRequest,
    GenerateRequest,
    GenerateResult,
    Interrupted,
    LLMProxy,
    NoWorker,
    Partial,
    ProxyConfig,
    RetriesExhausted,
    SimWorker,
    Span,
    WorkerLost,
)


def idle(proxy: LLMProxy) -> bool:
    stats = proxy.stats()
    live = stats.requests["queued"] + stats.requests["dispatched"]
    return not live and all(worker.load == worker.charged == worker.running == 0 for worker in stats.workers)


class Deaf(SimWorker):
    """Accepts, and never answers an interrupt: a stopped process."""

    async def interrupt(self, request_id: str) -> None:
        await asyncio.Event().wait()


async def test_a_finished_generation_says_where_and_how_long() -> None:
    proxy = LLMProxy([worker()])
    result = await proxy.generate(request())
    assert (result.worker, result.spans, result.finish_reason) == ("w", [Span(0, 0, 20)], "length")
    assert result.timing.running == pytest.approx(3.0) and result.timing.queued == 0.0
    assert result.timing.attempts == 1 and idle(proxy)


async def test_waiting_for_the_gate_is_counted_as_queued() -> None:
    proxy = LLMProxy([worker()])
    await proxy.suspend()
    task = start(proxy, request())
    await asyncio.sleep(500)
    assert proxy.stats().requests["queued"] == 1
    await proxy.resume()
    assert (await task).timing.queued == pytest.approx(500.0)


async def test_one_request_at_a_time_for_a_trajectory() -> None:
    proxy = LLMProxy([worker()])
    task = start(proxy, replace(request(), request_id="r"))
    await asyncio.sleep(0)
    with pytest.raises(DuplicateRequest) as caught:
        await proxy.generate(request())
    assert caught.value.field == "trajectory_id"
    with pytest.raises(DuplicateRequest) as caught:
        await proxy.generate(replace(request("u"), request_id="r"))
    assert caught.value.field == "request_id"
    await task
    await proxy.generate(request())


# Waiting for workers.


async def test_no_worker_is_an_error_after_a_bounded_wait() -> None:
    proxy = LLMProxy(config=ProxyConfig(patience=5.0))
    with pytest.raises(NoWorker, match="0 known"):
        await proxy.generate(request())
    assert asyncio.get_running_loop().time() == pytest.approx(5.0) and idle(proxy)


async def test_fenced_workers_are_named_with_their_reasons() -> None:
    dead = worker()
    proxy = LLMProxy([dead], config=ProxyConfig(patience=5.0))
    dead.die("out of memory")
    with pytest.raises(NoWorker, match="w: is dead"):
        await proxy.generate(request())
    await proxy.close()


async def test_a_worker_that_joins_takes_what_waits() -> None:
    proxy = LLMProxy()
    task = start(proxy, request())
    await asyncio.sleep(1)
    proxy.add_worker(worker())
    assert (await task).timing.queued == pytest.approx(1.0)


async def test_patience_does_not_run_out_while_suspended() -> None:
    proxy = LLMProxy([worker()], config=ProxyConfig(patience=5.0))
    await proxy.suspend()
    task = start(proxy, request())
    await asyncio.sleep(1_000)
    await proxy.resume()
    await task


async def test_ids_and_roles_are_checked() -> None:
    proxy = LLMProxy([worker()])
    with pytest.raises(ValueError, match="taken"):
        proxy.add_worker(worker())
    with pytest.raises(ValueError, match="taken"):
        proxy.add_worker(worker(role="prefill"))
    with pytest.raises(ValueError, match="known are"):
        proxy.remove_worker("x")


# Losing workers.


@pytest.mark.parametrize("tells", [True, False])
async def test_a_lost_worker_is_continued_elsewhere_with_what_is_known(tells: bool) -> None:
    first, second = worker("a", tells_partial=tells), worker("b")
    proxy = LLMProxy([first])
    task = start(proxy, request())
    await asyncio.sleep(1.95)  # 9 tokens
    proxy.add_worker(second)
    first.die()
    result = await task
    assert result.worker == "b" and result.timing.attempts == 2
    assert len(result.token_ids) == 20 and result.logprobs == [-float(i) for i in range(20)]
    assert result.timing.running == pytest.approx(1.95 + (1.09 + 1.1 if tells else 3.0))
    assert idle(proxy) and proxy.stats().lost == 1
    await proxy.close()


async def test_the_last_token_may_be_all_that_a_lost_worker_left_to_say() -> None:
    class Dying(SimWorker):
        async def generate(self, request: GenerateRequest) -> GenerateResult | Partial:
            raise WorkerLost(self.id, "gone", Partial([0] * 20, [0.0] * 20, [Span(0, 0, 20)], 0))

    proxy = LLMProxy([Dying("w")])
    result = await proxy.generate(request())
    assert (len(result.token_ids), result.finish_reason, result.worker) == (20, "length", "w")
    await proxy.close()


async def test_retries_are_bounded() -> None:
    workers = [worker(f"w{i}", tells_partial=False) for i in range(5)]
    proxy = LLMProxy(workers, config=ProxyConfig(attempts=3))
    task = start(proxy, request())
    for _ in range(3):
        await asyncio.sleep(0.5)
        for one in workers:
            if one.running:
                one.die("crashed")
    with pytest.raises(RetriesExhausted, match=r"after 3 attempts.*crashed"):
        await task
    assert proxy.stats().requests["failed"] == 1 and idle(proxy)
    await proxy.close()


async def test_a_flapping_worker_comes_back_each_time() -> None:
    one = worker()
    proxy = LLMProxy([one], config=ProxyConfig(attempts=10))
    task = start(proxy, request())
    for _ in range(4):
        await asyncio.sleep(0.5)
        one.die()
        await asyncio.sleep(0.5)
        assert proxy.stats().workers[0].fenced
        one.rejoin(version=0)
        await asyncio.sleep(1.0)
    result = await task
    assert result.logprobs == [-float(i) for i in range(20)] and result.timing.attempts == 5
    assert not proxy.stats().workers[0].fenced
    await proxy.close()


async def test_a_removed_worker_gives_up_what_it_has() -> None:
    proxy = LLMProxy([worker("a")])
    task = start(proxy, request())
    await asyncio.sleep(1.95)
    proxy.add_worker(worker("b"))
    proxy.remove_worker("a")
    result = await task
    assert result.worker == "b" and result.timing.running == pytest.approx(1.95 + 1.09 + 1.1)
    assert [stats.id for stats in proxy.stats().workers] == ["b"] and idle(proxy)


async def test_an_unexpected_error_of_a_worker_reaches_the_caller_and_is_counted() -> None:
    class Broken(SimWorker):
        async def generate(self, request: GenerateRequest) -> GenerateResult | Partial:
            raise RuntimeError("a defect")

    proxy = LLMProxy([Broken("w")])
    with pytest.raises(RuntimeError, match="a defect"):
        await proxy.generate(request())
    assert proxy.stats().requests["failed"] == 1 and idle(proxy) and not proxy.stats().workers[0].fenced


# Ending requests.


@pytest.mark.parametrize("by", ["t", "r"])
@pytest.mark.parametrize("queued", [True, False])
async def test_abort_ends_a_request_wherever_it_is(queued: bool, by: str) -> None:
    one = worker()
    proxy = LLMProxy([one])
    if queued:
        await proxy.suspend()
    task = start(proxy, replace(request(), request_id="r"))
    await asyncio.sleep(1.5)
    assert one.running == (not queued)
    assert await proxy.abort(by)
    assert one.running == 0
    with pytest.raises(Aborted):
        await task
    assert not await proxy.abort(by)
    assert proxy.stats().requests["aborted"] == 1 and idle(proxy)


async def test_cancelling_the_caller_aborts_in_the_engine() -> None:
    one = worker()
    proxy = LLMProxy([one])
    task = start(proxy, request())
    await asyncio.sleep(1.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert one.running == 0 and idle(proxy) and proxy.stats().requests["aborted"] == 1


async def test_a_callers_timeout_works_as_if_there_were_no_proxy() -> None:
    proxy = LLMProxy([worker()])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.5):
            await proxy.generate(request())
    current = asyncio.current_task()
    assert current is not None and current.cancelling() == 0 and idle(proxy)


async def test_an_outside_cancellation_wins_over_the_proxys_own() -> None:
    proxy = LLMProxy([worker()])
    task = start(proxy, request())
    await asyncio.sleep(1.5)
    abort = asyncio.create_task(proxy.abort("t"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await abort
    assert proxy.stats().requests["aborted"] == 1 and idle(proxy)


async def test_the_callers_task_is_not_left_cancelled_after_an_abort() -> None:
    proxy = LLMProxy([worker()])

    async def caller() -> int:
        with pytest.raises(Aborted):
            await proxy.generate(request())
        await asyncio.sleep(1)  # would raise if a cancellation were still pending
        current = asyncio.current_task()
        assert current is not None
        return current.cancelling()

    task = asyncio.create_task(caller())
    await asyncio.sleep(0.5)
    await proxy.abort("t")
    assert await task == 0


async def test_an_interrupted_generation_keeps_tokens_and_budget() -> None:
    proxy = LLMProxy([worker()])
    task = start(proxy, request())
    await asyncio.sleep(1.95)
    partial = await proxy.interrupt("t")
    assert partial == Partial([0] * 9, [-float(i) for i in range(9)], [Span(0, 0, 9)], 11)
    with pytest.raises(Interrupted) as caught:
        await task
    assert caught.value.partial == partial and idle(proxy)

    result = await proxy.generate(replace(request(), resume=partial))
    assert result.token_ids == [0] * 20 and result.logprobs == [-float(i) for i in range(20)]
    assert result.spans == [Span(0, 0, 20)]


async def test_interrupting_what_waits_or_is_not_there() -> None:
    proxy = LLMProxy([worker()])
    assert await proxy.interrupt("t") is None
    await proxy.suspend()
    task = start(proxy, request())
    await asyncio.sleep(1)
    assert await proxy.interrupt("t") == Partial([], [], [], 20)
    with pytest.raises(Interrupted):
        await task


async def test_interrupting_a_worker_that_does_not_answer_costs_only_its_tokens() -> None:
    proxy = LLMProxy([Deaf("w", decode_rate=0.001)], config=ProxyConfig(answer=5.0))
    task = start(proxy, request())
    await asyncio.sleep(1)
    assert await proxy.interrupt("t") == Partial([], [], [], 20)
    assert asyncio.get_running_loop().time() == pytest.approx(6.0)
    with pytest.raises(Interrupted):
        await task
    assert idle(proxy)


async def test_abort_during_an_interrupt_wins() -> None:
    proxy = LLMProxy([Deaf("w", decode_rate=0.001)])
    task = start(proxy, request())
    await asyncio.sleep(1)
    interrupt = asyncio.create_task(proxy.interrupt("t"))
    await asyncio.sleep(1)
    assert await proxy.abort("t")
    assert await interrupt is None
    with pytest.raises(Aborted):
        await task


async def test_an_interrupt_that_meets_a_death_gets_what_is_known() -> None:
    dying = Deaf("w", prefill_rate=100.0, decode_rate=10.0)
    proxy = LLMProxy([dying])
    task = start(proxy, request())
    await asyncio.sleep(1.95)
    interrupt = asyncio.create_task(proxy.interrupt("t"))
    await asyncio.sleep(0)
    dying.die()
    partial = await interrupt
    assert partial is not None and len(partial.token_ids) == 9
    with pytest.raises(Interrupted):
        await task
    await proxy.close()


async def test_close_ends_what_waits_and_what_runs() -> None:
    one, dead = worker("a"), worker("b")
    proxy = LLMProxy([one, dead], router=AffinityRouter())
    running = start(proxy, request("t"))
    await asyncio.sleep(0.5)
    dead.die()
    await proxy.suspend()
    waiting = start(proxy, request("u"))
    await asyncio.sleep(0.5)
    await proxy.close()
    for task in (running, waiting):
        with pytest.raises(Closed):
            await task
    with pytest.raises(Closed):
        await proxy.generate(request())
    assert one.running == 0 and idle(proxy)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_thousands_in_flight_leave_nothing_behind() -> None:
    workers = [SimWorker(f"w{i}") for i in range(16)]
    proxy = LLMProxy(workers)
    asked = [GenerateRequest(f"t{i}", [1] * 20, 5) for i in range(2_000)]
    results = await asyncio.gather(*map(proxy.generate, asked))
    assert len(results) == 2_000 and idle(proxy)
    assert proxy.stats().requests["finished"] == 2_000
