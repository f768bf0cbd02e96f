"""The simulated worker takes the time its rates say, and tells the truth in its tokens."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from llmproxy import GenerateRequest, GenerateResult, Partial, SimWorker, Span, UpdateFailed, WorkerLost, WrongState


def request(id: str = "t", prompt: int = 100, tokens: int = 10) -> GenerateRequest:
    return GenerateRequest(id, [1] * prompt, tokens, request_id=id)


def now() -> float:
    return asyncio.get_running_loop().time()


async def finish(worker: SimWorker, asked: GenerateRequest) -> tuple[GenerateResult, float]:
    result = await worker.generate(asked)
    assert isinstance(result, GenerateResult)
    return result, now()


async def test_prefill_then_decode() -> None:
    worker = SimWorker("w", prefill_rate=100.0, decode_rate=10.0)
    result, end = await finish(worker, request())
    assert end == pytest.approx(1.0 + 1.0)
    assert result.token_ids == [0] * 10 and result.logprobs == [-float(i) for i in range(10)]
    assert (result.spans, result.finish_reason, worker.running) == ([Span(0, 0, 10)], "length", 0)


async def test_a_batch_shares_the_decode_rate_and_prefill_queues() -> None:
    worker = SimWorker("w", prefill_rate=100.0, decode_rate=10.0, decode_total=10.0)
    ends = [end for _, end in await asyncio.gather(*(finish(worker, request(f"t{i}")) for i in range(2)))]
    # The second prefills until 2; the first has its 10 tokens by then. Alone again, the second takes 1 more.
    assert ends == pytest.approx([2.0, 3.0])


async def test_two_that_decode_together_take_twice_as_long() -> None:
    worker = SimWorker("w", prefill_rate=1e9, decode_rate=10.0, decode_total=10.0)
    ends = [end for _, end in await asyncio.gather(*(finish(worker, request(f"t{i}")) for i in range(2)))]
    assert ends == pytest.approx([2.0, 2.0], abs=1e-3)


async def test_a_later_turn_prefills_only_what_is_new() -> None:
    worker = SimWorker("w", prefill_rate=100.0, decode_rate=1e6)
    await finish(worker, request("t", 100, 1))
    start = now()
    result, end = await finish(worker, request("t", 151, 1))
    assert result.timing.cached_tokens == 101 and end - start == pytest.approx(0.5, abs=1e-3)
    await worker.update(1)
    await worker.resume()
    result, _ = await finish(worker, request("t", 151, 1))
    assert result.timing.cached_tokens == 0


async def test_kept_generations_go_on_after_an_update_with_their_caches_rebuilt() -> None:
    worker = SimWorker("w", prefill_rate=100.0, decode_rate=10.0, update_time=5.0)
    task = asyncio.create_task(finish(worker, request()))
    await asyncio.sleep(1.45)  # 4 whole tokens
    await worker.pause()
    await asyncio.sleep(100)
    ack = await worker.update(7)
    assert (ack.version, ack.error) == (7, "")
    await worker.resume()
    start = now()
    result, end = await task
    assert result.spans == [Span(0, 0, 4), Span(7, 4, 10)]
    assert result.token_ids == [0] * 4 + [7] * 6 and result.logprobs == [-float(i) for i in range(10)]
    assert end - start == pytest.approx(1.04 + 0.6)


async def test_a_worker_that_cannot_keep_hands_back_partials() -> None:
    worker = SimWorker("w", prefill_rate=100.0, decode_rate=10.0, keep=False)
    task = asyncio.create_task(worker.generate(request()))
    await asyncio.sleep(1.45)
    await worker.pause()
    assert await task == Partial([0] * 4, [-0.0, -1.0, -2.0, -3.0], [Span(0, 0, 4)], 6)
    assert worker.running == 0


async def test_a_request_that_meets_a_paused_worker_waits() -> None:
    worker = SimWorker("w")
    await worker.pause()
    task = asyncio.create_task(worker.generate(request()))
    await asyncio.sleep(1000)
    assert not task.done()
    await worker.update(1)
    await worker.resume()
    result = await task
    assert result.spans == [Span(1, 0, 10)]


async def test_death_tells_what_is_known_and_ends_everything_until_it_rejoins() -> None:
    worker = SimWorker("w", prefill_rate=100.0, decode_rate=10.0)
    task = asyncio.create_task(worker.generate(request()))
    await asyncio.sleep(1.45)
    worker.die()
    with pytest.raises(WorkerLost) as caught:
        await task
    assert caught.value.partial is not None and caught.value.partial.token_ids == [0] * 4
    for call in (worker.probe(), worker.pause(), worker.generate(request("u"))):
        with pytest.raises(WorkerLost):
            await call
    worker.rejoin(version=3)
    assert await worker.probe() == 3
    await finish(worker, request())


async def test_a_failed_update_leaves_no_version_and_no_service() -> None:
    worker = SimWorker("w")
    worker.failing_updates = 1
    with pytest.raises(UpdateFailed):
        await worker.update(1)
    assert await worker.probe() is None
    with pytest.raises(WrongState):
        await worker.resume()
    assert (await worker.update(1)).version == 1


async def test_a_restart_during_an_update_is_not_taken_for_success() -> None:
    worker = SimWorker("w", update_time=5.0)
    task = asyncio.create_task(worker.update(4))
    await asyncio.sleep(1)
    worker.die()
    worker.rejoin(version=0)
    with pytest.raises(WorkerLost, match="restarted"):
        await task
    assert await worker.probe() == 0


async def test_cancelling_frees_the_engine_and_the_others_get_faster() -> None:
    worker = SimWorker("w", prefill_rate=1e9, decode_rate=10.0, decode_total=10.0)
    tasks = [asyncio.create_task(finish(worker, request(f"t{i}"))) for i in range(2)]
    await asyncio.sleep(1.0)  # 5 tokens each
    tasks[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]
    assert worker.running == 1
    _, end = await tasks[1]
    assert end == pytest.approx(1.5, abs=1e-3)


async def test_one_that_ends_because_another_is_dropped_ends_once() -> None:
    worker = SimWorker("w", prefill_rate=1e9, decode_rate=1e9, decode_total=1.0)
    handoff = await worker.prefill(request("a", 1))
    first = asyncio.create_task(worker.generate(replace(request("a", 1), handoff=handoff)))
    second = asyncio.create_task(worker.generate(request("b", 1, 1)))
    await asyncio.sleep(1.0)
    await asyncio.sleep(worker._advance() - 1.5e-6)
    assert not second.done()
    worker.die()  # without the first, the rest of the second is less than times are told apart by
    with pytest.raises(WorkerLost):
        await first
    ended = await second
    assert isinstance(ended, GenerateResult) and worker.running == 0 == worker.backlog()


MOMENTS = st.integers(0, 500).map(lambda centiseconds: centiseconds / 100)


@settings(deadline=None)
@given(
    arrivals=st.lists(st.tuples(MOMENTS, st.integers(1, 200), st.integers(1, 60)), min_size=1, max_size=8),
    pauses=st.lists(MOMENTS, max_size=3),
    keep=st.booleans(),
)
def test_no_token_is_lost_or_made_twice(
    arrivals: list[tuple[float, int, int]], pauses: list[float], keep: bool
) -> None:
    import async_solipsism

    async def drive(worker: SimWorker, id: str, arrival: tuple[float, int, int]) -> GenerateResult:
        delay, prompt, tokens = arrival
        await asyncio.sleep(delay)
        asked = request(id, prompt, tokens)
        while isinstance(answer := await worker.generate(asked), Partial):
            asked = GenerateRequest(id, asked.prompt_ids, tokens, request_id=id, resume=answer)
        return answer

    async def scenario() -> None:
        worker = SimWorker("w", prefill_rate=500.0, decode_rate=20.0, decode_total=50.0, update_time=0.5, keep=keep)
        tasks = [asyncio.create_task(drive(worker, f"t{i}", arrival)) for i, arrival in enumerate(arrivals)]
        for version, pause in enumerate(pauses, 1):
            await asyncio.sleep(pause)
            await worker.update(version)
            await worker.resume()
        for (_, _, tokens), result in zip(arrivals, await asyncio.gather(*tasks), strict=True):
            made = [span.version for span in result.spans for _ in range(span.start, span.end)]
            assert result.token_ids == made and len(made) == tokens
            assert result.logprobs == [-float(i) for i in range(tokens)]
        assert worker.running == 0

    with asyncio.Runner(loop_factory=async_solipsism.EventLoop) as runner:
        runner.run(scenario())


async def test_one_that_is_cancelled_at_its_last_token_leaves_nothing_behind() -> None:
    worker = SimWorker("w", prefill_rate=100.0, decode_rate=10.0)
    running = asyncio.create_task(worker.generate(request()))
    asyncio.get_running_loop().call_at(2.0 - 5e-7, running.cancel)  # closer to its end than loops tell times apart
    with pytest.raises(asyncio.CancelledError):
        await running
    assert worker.running == 0
