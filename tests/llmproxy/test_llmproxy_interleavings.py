"""The race of admission, abort and interrupt with suspend, in every order the loop's callbacks could run.

The loop below runs one ready callback at a time and asks a schedule which; schedules are enumerated depth first.
asyncio itself runs them first come first served, so this is more than any run can show. Admission against suspend is
tried in every order; with a third task, in every order that leaves first come first served at most a few times.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import async_solipsism
import pytest

from llmproxy import (
    Aborted,
    Ack,
    GenerateRequest,
    GenerateResult,
    Interrupted,
    LLMProxy,
    Partial,
    Span,
    WorkerLost,
    extend_partial,
)
from llmproxy.worker import Role


class Schedule:
    """Which of the ready callbacks to run at each step: a given prefix, then always the first."""

    def __init__(self, prefix: list[int]) -> None:
        self.taken: list[int] = []
        self.options: list[int] = []
        self._prefix = prefix

    def choose(self, options: int) -> int:
        at = len(self.taken)
        choice = self._prefix[at] if at < len(self._prefix) else 0
        self.taken.append(choice)
        self.options.append(options)
        return choice

    def next(self, deviations: int | None) -> list[int] | None:
        """The prefix of the next schedule in depth-first order, with at most so many choices other than the first."""
        for at in reversed(range(len(self.taken))):
            changed = self.taken[at] + 1
            others = sum(choice > 0 for choice in self.taken[:at])
            if changed < self.options[at] and (deviations is None or others < deviations):
                return [*self.taken[:at], changed]
        return None


class ScheduledLoop(async_solipsism.EventLoop):
    def __init__(self, schedule: Schedule) -> None:
        super().__init__()
        self._schedule = schedule

    def _run_once(self) -> None:
        ready = self._ready
        if len(ready) < 2:
            return super()._run_once()
        chosen = self._schedule.choose(len(ready))
        others = [handle for at, handle in enumerate(ready) if at != chosen]
        handle = ready[chosen]
        ready.clear()
        ready.append(handle)
        super()._run_once()
        ready.extendleft(reversed(others))


def explore(scenario: Callable[[], Coroutine[Any, Any, None]], deviations: int | None = None) -> int:
    """Run the scenario under every schedule; how many there were."""
    prefix: list[int] | None = []
    runs = 0
    while prefix is not None:
        schedule = Schedule(prefix)
        with asyncio.Runner(loop_factory=lambda: ScheduledLoop(schedule)) as runner:  # noqa: B023
            try:
                runner.run(scenario())
            except BaseException as error:
                error.add_note(f"schedule {schedule.taken}")
                raise
        runs += 1
        prefix = schedule.next(deviations)
    return runs


class StepWorker:
    """Makes a token a loop step, and checks at each that it may."""

    hardware = "step"
    role: Role = "both"
    context_limit = 100

    def __init__(self, keep: bool) -> None:
        self.id = "w"
        self.version: int | None = 0
        self.keep = keep
        self.paused = False
        self.silent = False  # between the return of suspend and the call of resume
        self.running: set[str] = set()
        self._leaving: set[str] = set()
        self._changed = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> GenerateResult | Partial:
        id = request.request_id
        self.running.add(id)
        spans: list[Span] = []
        try:
            while len(spans) < request.budget:
                await asyncio.sleep(0)
                while self.paused and id not in self._leaving:
                    self._changed.clear()
                    await self._changed.wait()
                if id in self._leaving:
                    return self._partial(request, spans)
                assert not self.silent, "made a token while suspended"
                assert self.version is not None
                spans.append(Span(self.version, len(spans), len(spans) + 1))
            done = self._partial(request, spans)
            return GenerateResult(done.token_ids, done.logprobs, done.spans, "length", self.id)
        finally:
            self.running.discard(id)
            self._leaving.discard(id)

    def _partial(self, request: GenerateRequest, spans: list[Span]) -> Partial:
        return extend_partial(request, [span.version for span in spans], [0.0] * len(spans), spans)

    async def abort(self, request_id: str) -> None:
        raise NotImplementedError

    async def interrupt(self, request_id: str) -> None:
        if request_id in self.running:
            self._leaving.add(request_id)
            self._changed.set()
        await asyncio.sleep(0)

    async def pause(self) -> None:
        self.paused = True
        if not self.keep:
            self._leaving |= self.running
        await asyncio.sleep(0)

    async def prefetch(self, version: int) -> None:
        raise NotImplementedError

    async def update(self, version: int) -> Ack:
        assert self.paused
        self.version = None
        await asyncio.sleep(0)
        self.version = version
        return Ack(self.id, version)

    async def resume(self) -> None:
        self.paused = False
        self._changed.set()
        await asyncio.sleep(0)

    async def probe(self) -> int | None:
        raise WorkerLost(self.id, "is never fenced here")


async def roll(proxy: LLMProxy, worker: StepWorker) -> None:
    await proxy.suspend()
    worker.silent = True
    assert [ack.error for ack in await proxy.update(1)] == [""]
    worker.silent = False
    await proxy.resume()


def check(result: GenerateResult, tokens: int) -> None:
    assert [span.version for span in result.spans] in ([0], [1], [0, 1])
    assert result.token_ids == [span.version for span in result.spans for _ in range(span.start, span.end)]
    assert len(result.token_ids) == tokens


def check_idle(proxy: LLMProxy, worker: StepWorker, **ends: int) -> None:
    stats = proxy.stats()
    assert not worker.running and stats.workers[0].charged == stats.workers[0].running == 0
    assert {name: stats.requests[name] for name in ends} == ends
    assert stats.requests["admitted"] == sum(ends.values()) and not stats.suspended


@pytest.mark.parametrize("keep", [True, False])
def test_a_request_runs_before_the_suspend_or_waits_or_is_carried_over(keep: bool) -> None:
    seen: set[tuple[int, ...]] = set()

    async def scenario() -> None:
        worker = StepWorker(keep)
        proxy = LLMProxy([worker])
        rolling = asyncio.create_task(roll(proxy, worker))
        result = await proxy.generate(GenerateRequest("t", [1], 2))
        await rolling
        check(result, 2)
        seen.add(tuple(span.version for span in result.spans))
        check_idle(proxy, worker, finished=1)

    runs = explore(scenario)
    assert runs > 50 and seen == {(0,), (1,), (0, 1)}


@pytest.mark.parametrize("keep", [True, False])
def test_an_abort_during_an_update_ends_the_request_once(keep: bool) -> None:
    ends: set[str] = set()

    async def scenario() -> None:
        worker = StepWorker(keep)
        proxy = LLMProxy([worker])
        task = asyncio.create_task(proxy.generate(GenerateRequest("t", [1], 2)))
        rolling = asyncio.create_task(roll(proxy, worker))
        aborting = asyncio.create_task(proxy.abort("t"))
        await rolling
        found = await aborting
        try:
            check(await task, 2)
            assert not found
            check_idle(proxy, worker, finished=1)
            ends.add("finished")
        except Aborted:
            assert found
            check_idle(proxy, worker, aborted=1)
            ends.add("aborted")

    explore(scenario, deviations=4)
    assert ends == {"finished", "aborted"}


@pytest.mark.parametrize("keep", [True, False])
def test_an_interrupt_during_an_update_hands_back_exact_tokens_or_none(keep: bool) -> None:
    lengths: set[int] = set()

    async def scenario() -> None:
        worker = StepWorker(keep)
        proxy = LLMProxy([worker])
        request = GenerateRequest("t", [1], 2)
        task = asyncio.create_task(proxy.generate(request))
        rolling = asyncio.create_task(roll(proxy, worker))
        interrupting = asyncio.create_task(proxy.interrupt("t"))
        await rolling
        partial = await interrupting
        try:
            check(await task, 2)
            assert partial is None
            check_idle(proxy, worker, finished=1)
        except Interrupted as error:
            kept = error.partial
        else:
            return
        assert partial == kept
        lengths.add(len(kept.token_ids))
        check_idle(proxy, worker, aborted=1)
        if kept.remaining:
            check(await proxy.generate(GenerateRequest("t", [1], 2, resume=kept)), 2)

    explore(scenario, deviations=4)
    assert {0, 1} <= lengths


def test_two_requests_and_an_outside_cancellation_during_an_update() -> None:
    async def scenario() -> None:
        worker = StepWorker(keep=True)
        proxy = LLMProxy([worker])
        tasks = [asyncio.create_task(proxy.generate(GenerateRequest(f"t{i}", [1], 2))) for i in range(2)]
        rolling = asyncio.create_task(roll(proxy, worker))
        asyncio.get_running_loop().call_soon(tasks[0].cancel)
        await rolling
        check(await tasks[1], 2)
        (gone,) = await asyncio.gather(tasks[0], return_exceptions=True)
        if isinstance(gone, asyncio.CancelledError):
            admitted = proxy.stats().requests["admitted"]  # a task cancelled before its first step admits nothing
            check_idle(proxy, worker, finished=1, aborted=admitted - 1)
        else:
            assert isinstance(gone, GenerateResult)
            check(gone, 2)
            check_idle(proxy, worker, finished=2)

    explore(scenario, deviations=3)
