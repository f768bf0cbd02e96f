"""The race of admission, abort and interrupt with suspend, in every order the loop's callbacks could run.

The loop below runs one ready callback at a time and asks a schedule which; schedules are enumerated depth first.
asyncio itself runs them first come first served, so this is more than any run can show. Admission against suspend is
tried in every order; with a third task, in every order that leaves first come first served at most a few times.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

import async_solipsism
import pytest

from llmproxy import (
    Aborted,
    Ack,
    GenerateRequest,
    GenerateResult,
    Handoff,
    Interrupted,
    LLMProxy,
    Partial,
    Span,
    WorkerLost,
    extend_partial,
)
from llmproxy.fleet import Slot
from llmproxy.flights import Flights
from llmproxy.ledger import Entry
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
        assert not self.silent, "was given a request while suspended"
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


class Prefiller(StepWorker):
    """Computes a context in two steps and keeps it until somebody took it."""

    role: Role = "prefill"

    def __init__(self, keep: bool) -> None:
        super().__init__(keep)
        self.id = "p"
        self.kept: set[str] = set()

    async def prefill(self, request: GenerateRequest) -> Handoff | None:
        assert not self.silent, "was given a request while suspended"
        id = request.request_id
        self.running.add(id)
        try:
            for _ in range(2):
                await asyncio.sleep(0)
                while self.paused and id not in self._leaving:
                    self._changed.clear()
                    await self._changed.wait()
                if id in self._leaving:
                    return None
            assert self.version is not None
            self.kept.add(id)
            handoff = Handoff(self.id, self.version, {"from": self})
            for _ in range(8):  # the answer is on its way for longer than a suspend takes
                await asyncio.sleep(0)
            return handoff
        finally:
            self.running.discard(id)
            self._leaving.discard(id)


class Decoder(StepWorker):
    """Takes the context in a step, from weights that must be its own."""

    role: Role = "decode"

    async def generate(self, request: GenerateRequest) -> GenerateResult | Partial:
        assert not self.silent, "was given a request while suspended"
        handoff = request.handoff
        assert handoff is not None, "was left to prefill"
        if self.paused or handoff.version != self.version:
            handoff.params["from"].kept.discard(request.request_id)
            return self._partial(request, [])
        try:
            await asyncio.sleep(0)
            if self.paused:
                return self._partial(request, [])
            assert handoff.version == self.version, "took a cache of other weights"
        finally:
            handoff.params["from"].kept.discard(request.request_id)
        return await super().generate(request)

    async def release(self, handoff: Handoff) -> None:
        handoff.params["from"].kept.clear()
        await asyncio.sleep(0)


async def roll(proxy: LLMProxy, *workers: StepWorker) -> None:
    await proxy.suspend()
    for worker in workers:
        worker.silent = True
    assert {ack.error for ack in await proxy.update(1)} == {""}
    for worker in workers:
        worker.silent = False
    await proxy.resume()


def check(result: GenerateResult, tokens: int) -> None:
    assert [span.version for span in result.spans] in ([0], [1], [0, 1])
    assert result.token_ids == [span.version for span in result.spans for _ in range(span.start, span.end)]
    assert len(result.token_ids) == tokens


def check_idle(proxy: LLMProxy, worker: StepWorker, **ends: int) -> None:
    stats = proxy.stats()
    assert not worker.running and all(one.charged == one.running == 0 for one in stats.workers)
    assert {name: stats.requests[name] for name in ends} == ends
    assert stats.requests["admitted"] == sum(ends.values()) and not stats.suspended


@pytest.mark.parametrize("keep", [True, False])
def test_a_request_runs_before_the_suspend_or_waits_or_is_carried_over(keep: bool) -> None:
    seen: set[tuple[int, ...]] = set()

    async def scenario() -> None:
        worker = StepWorker(keep)
        proxy = LLMProxy([worker])
        rolling = asyncio.create_task(roll(proxy, worker))
        task = asyncio.create_task(proxy.generate(GenerateRequest("t", [1], 2)))
        await rolling
        result = await task
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


@pytest.mark.parametrize("keep", [True, False])
def test_a_request_in_two_phases_uses_no_cache_of_old_weights(keep: bool) -> None:
    seen: set[tuple[int, ...]] = set()

    async def scenario(delay: int) -> None:
        prefiller, decoder = Prefiller(keep), Decoder(keep)
        proxy = LLMProxy([prefiller, decoder])
        task = asyncio.create_task(proxy.generate(GenerateRequest("t", [1], 2)))
        for _ in range(delay):
            await asyncio.sleep(0)
        await roll(proxy, prefiller, decoder)
        result = await task
        check(result, 2)
        seen.add(tuple(span.version for span in result.spans))
        assert not prefiller.running and not prefiller.kept
        check_idle(proxy, decoder, finished=1)

    for delay in range(0, 18, 2):  # the update begins in each of the request's phases
        explore(functools.partial(scenario, delay), deviations=1)
    assert seen == {(0,), (1,), (0, 1)}


@pytest.mark.parametrize("how", ["abort", "interrupt"])
def test_taking_a_request_away_in_either_phase_leaves_nothing(how: str) -> None:
    ends: set[str] = set()

    async def scenario() -> None:
        prefiller, decoder = Prefiller(True), Decoder(True)
        proxy = LLMProxy([prefiller, decoder])
        task = asyncio.create_task(proxy.generate(GenerateRequest("t", [1], 2)))
        taking = asyncio.create_task(proxy.abort("t") if how == "abort" else proxy.interrupt("t"))
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        found = await taking
        ends.add(type(outcome).__name__)
        if isinstance(outcome, GenerateResult):
            check(outcome, 2)
            check_idle(proxy, decoder, finished=1)
        else:
            assert isinstance(outcome, Aborted | Interrupted) and found is not False
            check_idle(proxy, decoder, aborted=1)
        assert not prefiller.running

    explore(scenario, deviations=4)
    assert ends == {"GenerateResult", "Aborted" if how == "abort" else "Interrupted"}


# A test that cannot fail shows nothing: each guard is taken away in turn.


async def _place_late(self: Flights, entry: Entry) -> Slot:
    """As Flights._place, with a step between the gate's check and the dispatch."""
    while self._gate.suspended or (slot := self._router.choose(entry.request, self._fleet)) is None:
        await self._woken(entry, None)
    await asyncio.sleep(0)
    self.ledger.dispatch(entry, slot, 0.0, self._prefills.choose(entry.request, slot))
    entry.versions = {self._gate.version}
    return slot


async def _go_on_blindly(self: Flights, entry: Entry, slot: Slot) -> bool:
    """As Flights._prefill, without looking at the gate again."""
    handoff = await self._prefills.run(entry.request, slot)
    if handoff is None:
        return False
    self.ledger.prefilled(entry, handoff, 0.0)
    return True


async def _place_blindly(self: Flights, entry: Entry) -> Slot:
    """As Flights._place, without looking at the gate."""
    while (slot := self._router.choose(entry.request, self._fleet)) is None:
        await self._woken(entry, None)
    self.ledger.dispatch(entry, slot, 0.0, self._prefills.choose(entry.request, slot))
    entry.versions = {self._gate.version}
    return slot


@pytest.mark.parametrize("broken", [_place_late, _place_blindly])
def test_a_broken_gate_is_caught(monkeypatch: pytest.MonkeyPatch, broken: object) -> None:
    monkeypatch.setattr(Flights, "_place", broken)
    with pytest.raises(AssertionError, match="while suspended"):
        test_a_request_runs_before_the_suspend_or_waits_or_is_carried_over(True)


def test_a_second_phase_that_does_not_ask_the_gate_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Flights, "_prefill", _go_on_blindly)
    with pytest.raises(AssertionError, match="while suspended"):
        test_a_request_in_two_phases_uses_no_cache_of_old_weights(True)
