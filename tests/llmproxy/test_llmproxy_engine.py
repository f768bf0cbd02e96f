"""The simulated engine against one that takes one step after the other, and what it does when memory is full."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct

from llmproxy import GenerateRequest, GenerateResult, SimWorker
from llmproxy.sim import H20, H800, Pace, Roofline, Shape
from llmproxy.sim.engine import Engine
from llmproxy.sim.job import Job

SHAPE = Shape(parameters=8.2e9, layers=36, heads=32, kv_heads=8, head_dim=128)


class Small(Struct, frozen=True):
    """Steps whose time grows with batch and residents, and a memory that fills."""

    capacity: float = 1e9
    batch: float = 100
    together: float = 64

    def pace(self, decoding: int, prefilling: float, depth: float) -> Pace:
        chunk = min(prefilling, 64.0)
        return Pace(0.01 + 0.001 * decoding + 0.0005 * chunk, 1e-5, chunk)

    def transfer(self, tokens: float) -> float:
        return tokens * 1e-3


def step_by_step(lengths: list[tuple[int, int]], speed: Small) -> list[float]:
    """When each of (prompt, tokens), all there from the start, ends; in pieces of a step too small to matter."""
    waiting = deque(enumerate(lengths))
    ends = [0.0] * len(lengths)
    members: dict[int, list[float]] = {}  # what each holds, and what it has still to make
    now = 0.0
    prompts: list[tuple[int, tuple[int, int]]] = []
    left = 0.0
    changed = True
    while waiting or members or prompts:
        if not prompts and waiting:
            while waiting and (not prompts or left + waiting[0][1][0] <= speed.together):
                prompts.append(waiting.popleft())
                left += prompts[-1][1][0]
            total = left
            changed = True
        if changed:
            pace, changed = speed.pace(len(members), total if prompts else 0.0, 0.0), False
        piece = min([1e-2, *([left / pace.chunk] if left else []), *(to_make for _, to_make in members.values())])
        now += piece * (pace.base + pace.slope * sum(held for held, _ in members.values()))
        for number, member in list(members.items()):
            member[0] += piece
            member[1] -= piece
            if member[1] <= 1e-9:
                ends[number] = now
                del members[number]
                changed = True
        if prompts:
            left -= piece * pace.chunk
            if left <= 1e-9:
                for number, (prompt, tokens) in prompts:
                    members[number] = [prompt, tokens]
                prompts, left, changed = [], 0.0, True
    return ends


@settings(max_examples=25)
@given(lengths=st.lists(st.tuples(st.integers(1, 150), st.integers(1, 12)), min_size=1, max_size=5))
def test_the_closed_form_is_one_step_after_the_other(lengths: list[tuple[int, int]]) -> None:
    ends: dict[str, float] = {}
    engine = Engine(Small(), 0.0, False, lambda job: ends.update({job.request.request_id: engine.at}))
    for number, (prompt, tokens) in enumerate(lengths):
        request = GenerateRequest(f"t{number}", [1] * prompt, tokens, request_id=str(number))
        engine.add(Job(request, tokens, None))
    engine.advance(1e6)
    assert [ends[str(number)] for number in range(len(lengths))] == pytest.approx(
        step_by_step(lengths, Small()), rel=2e-3
    )


@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 300), st.integers(1, 150), st.integers(1, 40)), min_size=1, max_size=8
    ),
    looks=st.lists(st.integers(0, 2_000), max_size=20),
)
def test_looking_changes_nothing(arrivals: list[tuple[int, int, int]], looks: list[int]) -> None:
    def run(times: list[int]) -> dict[str, float]:
        ends: dict[str, float] = {}
        engine = Engine(Small(capacity=400), 100, False, lambda job: ends.update({job.request.request_id: engine.at}))
        todo = sorted((at, number) for number, (at, _, _) in enumerate(arrivals))
        for time in sorted([*times, *(at for at, _ in todo)]):
            engine.advance(time / 100)
            while todo and todo[0][0] <= time:
                number = todo.pop(0)[1]
                _, prompt, tokens = arrivals[number]
                engine.add(
                    Job(GenerateRequest(f"t{number}", [1] * prompt, tokens, request_id=str(number)), tokens, None)
                )
        engine.advance(1e6)
        return ends

    plain = run([])
    assert len(plain) == len(arrivals) and run(looks) == pytest.approx(plain, rel=1e-6, abs=1e-5)


async def finish(worker: SimWorker, name: str, prompt: int, tokens: int) -> GenerateResult:
    result = await worker.generate(GenerateRequest(name, [1] * prompt, tokens, request_id=name))
    assert isinstance(result, GenerateResult) and result.logprobs == [-float(i) for i in range(tokens)]
    return result


async def test_when_memory_is_full_the_youngest_is_put_back_and_nothing_is_lost() -> None:
    worker = SimWorker("w", speed=Small(capacity=1_000))
    await asyncio.gather(*(finish(worker, f"t{i}", 100, 200) for i in range(8)))
    assert worker.preemptions > 0 and worker.running == 0 == worker.backlog()
    roomy = SimWorker("w", speed=Small(capacity=10_000))
    await asyncio.gather(*(finish(roomy, f"t{i}", 100, 200) for i in range(8)))
    assert roomy.preemptions == 0


async def test_the_backlog_falls_with_every_token_that_is_made() -> None:
    worker = SimWorker("w", prefill_rate=100.0, decode_rate=10.0, length=lambda request: 20)
    tasks = [asyncio.create_task(finish(worker, f"t{i}", 100, 20)) for i in range(2)]
    await asyncio.sleep(0)
    assert worker.backlog() == 200
    seen = []
    for _ in range(4):
        await asyncio.sleep(0.55)
        await worker.probe()
        worker._advance()
        seen.append(worker.backlog())
    assert seen == [200, 119, 113, 26]
    await asyncio.gather(*tasks)
    assert worker.backlog() == 0


async def test_one_that_is_larger_than_the_memory_runs_alone() -> None:
    worker = SimWorker("w", speed=Small(capacity=100))
    await asyncio.gather(*(finish(worker, f"t{i}", 150, 10) for i in range(3)))
    assert worker.running == 0


async def test_caches_give_way_to_sequences() -> None:
    worker = SimWorker("w", speed=Small(capacity=1_000))
    for i in range(5):
        await finish(worker, f"t{i}", 150, 10)
    assert (await finish(worker, "t4", 200, 10)).timing.cached_tokens == 160
    await asyncio.gather(*(finish(worker, f"u{i}", 280, 10) for i in range(3)))
    # What three of 290 tokens leave of 1,000 is all that stays, of the latest context.
    assert 120 <= (await finish(worker, "t4", 260, 10)).timing.cached_tokens <= 130
    await asyncio.gather(*(finish(worker, f"v{i}", 322, 11) for i in range(3)))
    assert (await finish(worker, "t4", 400, 10)).timing.cached_tokens <= 1


async def test_one_put_back_computes_only_what_others_took() -> None:
    ends: list[Job] = []
    engine = Engine(Small(capacity=1_000), 1e9, False, ends.append)
    jobs = [Job(GenerateRequest(f"t{i}", [1] * 400, 120, request_id=f"t{i}"), 120, None) for i in range(2)]
    for job in jobs:
        engine.add(job)
    engine.advance(1e6)
    # Both fill the memory with 500 tokens each; the first makes 20 more, in the room of the second.
    assert engine.preemptions == 1 and ends == jobs and 10 < jobs[1].need < 30
    assert [job.cached for job in jobs] == [0, 0]  # what was found at first is what a result tells


async def test_without_a_cache_every_turn_computes_its_whole_context() -> None:
    worker = SimWorker("w", cache_tokens=0)
    for length in (100, 200, 300):
        assert (await finish(worker, "t", length, 10)).timing.cached_tokens == 0


async def test_members_of_a_group_share_their_prompt() -> None:
    worker = SimWorker("w", share_prompts=True)
    assert (await finish(worker, "t0", 500, 10)).timing.cached_tokens == 0
    assert (await finish(worker, "t1", 500, 10)).timing.cached_tokens == 499
    assert (await finish(SimWorker("v"), "t1", 500, 10)).timing.cached_tokens == 0


async def test_each_device_is_better_at_what_it_is_made_for() -> None:
    async def seconds(device: object, prompt: int, tokens: int) -> float:
        worker = SimWorker("w", speed=Roofline(device, SHAPE))  # type: ignore[arg-type]
        start = asyncio.get_running_loop().time()
        await asyncio.gather(*(finish(worker, f"t{i}", prompt, tokens) for i in range(16)))
        return asyncio.get_running_loop().time() - start

    assert await seconds(H800, 8_000, 20) < 0.25 * await seconds(H20, 8_000, 20)
    assert await seconds(H20, 100, 2_000) < await seconds(H800, 100, 2_000)
