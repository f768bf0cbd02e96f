"""Everything at once, in any order: requests, aborts, interrupts, cancellations, updates, deaths, silence, returns.

Nothing is lost or made twice, nothing comes from a version that was not allowed while the request lived, every
request ends exactly once, and when all is over nothing is left: no load, no running generation, no task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from random import Random
from typing import Any, TypeVar

import async_solipsism
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llmproxy import (
    Aborted,
    AffinityRouter,
    GenerateRequest,
    GenerateResult,
    Interrupted,
    LLMProxy,
    Partial,
    ProxyConfig,
    RetriesExhausted,
    SimWorker,
    UpdateFailed,
    WrongState,
)
from llmproxy.sim import Rates
from llmproxy.worker import Role

T = TypeVar("T")
WORKERS = 3
ROLES: list[tuple[Role, ...]] = [
    ("both", "both", "both"),
    ("prefill", "decode", "decode"),
    ("decode", "prefill", "both"),
    ("prefill", "prefill", "decode"),
]
PICK = st.integers(0, WORKERS - 1)
ENDS = {
    GenerateResult: "finished",
    Aborted: "aborted",
    Interrupted: "aborted",
    asyncio.CancelledError: "aborted",
    RetriesExhausted: "failed",
}


class Submitted:
    """A request under way, and which versions may appear in what it adds."""

    def __init__(self, request: GenerateRequest, since: int, task: asyncio.Task[GenerateResult]) -> None:
        self.request = request
        self.since = since
        self.task = task


class ProxyMachine(RuleBasedStateMachine):
    @initialize(
        keeps=st.tuples(*[st.booleans()] * WORKERS),
        roles=st.sampled_from(ROLES),
        on_failure=st.sampled_from(["fence", "fail"]),
    )
    def begin(self, keeps: tuple[bool, ...], roles: tuple[Role, ...], on_failure: Any) -> None:
        self.runner = asyncio.Runner(loop_factory=async_solipsism.EventLoop)
        self.workers = [
            SimWorker(
                f"w{i}",
                hardware=f"class{i % 2}",
                role=roles[i],
                update_time=0.5,
                keep=keep,
                tells_partial=i != 1,
                speed=Rates(500.0, 20.0, 50.0, handoff=2_000.0),
            )
            for i, keep in enumerate(keeps)
        ]
        self.version = 0
        self.suspended = False
        self.count = 0
        self.flying: list[Submitted] = []
        self.partials: list[tuple[GenerateRequest, Partial]] = []
        self.ends = dict.fromkeys(("finished", "aborted", "failed"), 0)
        self.proxy = self.run(self._make(on_failure))

    async def _make(self, on_failure: Any) -> LLMProxy:
        config = ProxyConfig(on_failure=on_failure, attempts=3, patience=1e7, update=5.0, answer=5.0)
        router = AffinityRouter({"default": "class0"}, saturation=200, random=Random(0))
        prefill_router = AffinityRouter(random=Random(1))
        return LLMProxy(self.workers, router=router, prefill_router=prefill_router, config=config)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    # Requests.

    @rule(prompt=st.integers(1, 300), tokens=st.integers(1, 60), task=st.sampled_from(["default", "other"]))
    def submit(self, prompt: int, tokens: int, task: str) -> None:
        self._submit(GenerateRequest(f"t{self.count}", [1] * prompt, tokens, task=task))

    @precondition(lambda self: self.partials)
    @rule()
    def go_on(self) -> None:
        request, partial = self.partials.pop()
        if partial.remaining:
            self._submit(GenerateRequest(f"t{self.count}", request.prompt_ids, request.max_tokens, resume=partial))

    def _submit(self, request: GenerateRequest) -> None:
        async def submit() -> None:
            self.flying.append(Submitted(request, self.version, asyncio.create_task(self.proxy.generate(request))))

        self.count += 1
        self.run(submit())

    @rule(seconds=st.sampled_from([0.01, 0.3, 1.0, 5.0]))
    def pass_time(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    @precondition(lambda self: self.flying and not self.suspended)
    @rule()
    def finish_one(self) -> None:
        self.run(asyncio.wait([self.flying[0].task], timeout=60))

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), how=st.sampled_from(["abort", "interrupt", "cancel"]))
    def take_away(self, data: st.DataObject, how: str) -> None:
        one = data.draw(st.sampled_from(self.flying))
        if how == "abort":
            self.run(self.proxy.abort(one.request.trajectory_id))
        elif how == "interrupt":
            partial = self.run(self.proxy.interrupt(one.request.trajectory_id))
            assert partial is None or partial.remaining == one.request.max_tokens - len(partial.token_ids)
        else:
            one.task.cancel()

    # Weights.

    @rule()
    def suspend(self) -> None:
        self.run(self.proxy.suspend())
        self.suspended = True

    @precondition(lambda self: self.suspended)
    @rule()
    def update(self) -> None:
        # Requests that were in flight see the new version from here on, whether the update holds or not.
        try:
            self.run(self.proxy.update(self.version + 1))
            self.version += 1
        except UpdateFailed:
            assert self.proxy.stats().suspended

    @precondition(lambda self: self.suspended)
    @rule()
    def resume(self) -> None:
        try:
            self.run(self.proxy.resume())
            self.suspended = False
        except WrongState:
            assert self.proxy.stats().suspended

    @precondition(lambda self: not self.suspended)
    @rule()
    def roll(self) -> None:
        self.suspend()
        self.update()
        self.resume()

    @rule(step=st.sampled_from(["suspend", "update", "resume"]), seconds=st.sampled_from([0.0, 0.2, 3.0, 7.0]))
    def give_up(self, step: str, seconds: float) -> None:
        """Whoever asked for a step waits no longer for it: it may be done, in part, or not at all."""

        async def ask() -> None:
            with suppress(TimeoutError, UpdateFailed, WrongState):
                async with asyncio.timeout(seconds):
                    match step:
                        case "suspend":
                            await self.proxy.suspend()
                        case "update":
                            await self.proxy.update(self.version + 1)
                        case "resume":
                            await self.proxy.resume()

        self.run(ask())
        stats = self.proxy.stats()
        self.version, self.suspended = stats.version, stats.suspended

    # Faults.

    @rule(which=PICK)
    def die(self, which: int) -> None:
        async def die() -> None:
            self.workers[which].die()

        self.run(die())

    @rule(which=PICK, current=st.booleans())
    def rejoin(self, which: int, current: bool) -> None:
        async def rejoin() -> None:
            self.workers[which].rejoin(self.version if current else 0)

        self.run(rejoin())

    @rule(which=PICK, silent=st.booleans())
    def fall_silent(self, which: int, silent: bool) -> None:
        async def change() -> None:
            if silent:
                self.workers[which].freeze()
            else:
                self.workers[which].thaw()

        self.run(change())

    @rule(which=PICK)
    def find_unfit(self, which: int) -> None:
        """Somebody else found that a worker does not serve."""

        async def lose() -> None:
            for slot in self.proxy.workers():
                if slot.worker is self.workers[which]:
                    self.proxy.lose(slot, "was found unfit")

        self.run(lose())

    @rule(which=PICK)
    def break_next_update(self, which: int) -> None:
        self.workers[which].failing_updates = 1

    @rule(which=PICK)
    def replace_worker(self, which: int) -> None:
        async def replace() -> None:
            worker = self.workers[which]
            if worker.id in {stats.id for stats in self.proxy.stats().workers}:
                self.proxy.remove_worker(worker.id)
            else:
                self.proxy.add_worker(worker)
            await asyncio.sleep(0)

        self.run(replace())

    # What must hold.

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "proxy"):
            return
        for one in [one for one in self.flying if one.task.done()]:
            self.flying.remove(one)
            self._ended(one)
        stats = self.proxy.stats()
        counts = stats.requests
        assert {name: counts[name] for name in self.ends} == self.ends
        assert counts["queued"] + counts["dispatched"] == len(self.flying)
        assert counts["admitted"] == sum(self.ends.values()) + len(self.flying)
        assert stats.version == self.version

    def _ended(self, one: Submitted) -> None:
        if one.task.cancelled():
            self.ends["aborted"] += 1
            return
        error = one.task.exception()
        if error is not None and type(error) not in ENDS:
            raise error
        outcome = error or one.task.result()
        self.ends[ENDS[type(outcome)]] += 1
        if isinstance(outcome, GenerateResult):
            assert len(outcome.token_ids) == one.request.max_tokens
            self._check_tokens(one, outcome)
        elif isinstance(outcome, Interrupted):
            self._check_tokens(one, outcome.partial)
            self.partials.append((one.request, outcome.partial))

    def _check_tokens(self, one: Submitted, made: GenerateResult | Partial) -> None:
        told = [span.version for span in made.spans for _ in range(span.start, span.end)]
        assert made.token_ids == told and made.logprobs == [-float(i) for i in range(len(told))]
        before = len(one.request.resume.token_ids) if one.request.resume else 0
        assert all(one.since <= version <= self.version for version in told[before:])
        assert told[before:] == sorted(told[before:])

    def teardown(self) -> None:
        if not hasattr(self, "proxy"):
            return
        with self.runner:
            self._finish()

    def _finish(self) -> None:
        self.run(self._settle())
        self.books_balance()
        assert not self.flying
        for worker in self.workers:
            assert worker.running == 0 == worker.pinned
        assert all(stats.load == stats.charged == stats.running == 0 for stats in self.proxy.stats().workers)
        assert not any(stats.fenced for stats in self.proxy.stats().workers)
        self.run(self.proxy.close())
        self.run(self._alone())

    async def _settle(self) -> None:
        """All workers are back: what is in flight must end by itself."""
        known = {stats.id for stats in self.proxy.stats().workers}
        for worker in self.workers:
            worker.failing_updates = 0
            worker.rejoin(0)
            if worker.id not in known:
                self.proxy.add_worker(worker)
        await self.proxy.suspend()
        await self.proxy.update(self.version + 1)
        self.version += 1
        await self.proxy.resume()
        await asyncio.gather(*(one.task for one in self.flying), return_exceptions=True)
        await asyncio.sleep(30)

    async def _alone(self) -> None:
        assert asyncio.all_tasks() == {asyncio.current_task()}


TestProxy = ProxyMachine.TestCase
TestProxy.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class LongProxyMachine(ProxyMachine):
    """The same, for longer."""


TestProxyLonger = pytest.mark.slow(LongProxyMachine.TestCase)
TestProxyLonger.settings = settings(max_examples=1_500, stateful_step_count=60, deadline=None)
