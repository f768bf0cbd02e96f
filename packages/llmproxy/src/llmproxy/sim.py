"""A worker on the loop's own clock: continuous batching by rates, for control-plane tests and simulation.

Prefill is served one request at a time at `prefill_rate` tokens a second; all prefilled requests decode together,
each at `min(decode_rate, decode_total / batch)`. Because every member advances equally, one counter of tokens per
member orders the whole batch, and an event costs O(log batch) however many tokens lie before it.

A token's id is the version that made it and its log-probability is minus its position, so that whoever holds a
result can check spans and continuity (tests/llmproxy/test_llmproxy_sim.py). With a virtual-time loop no time passes.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import OrderedDict, deque
from collections.abc import Callable

from .errors import Aborted, DuplicateRequest, UpdateFailed, WorkerLost, WrongState
from .values import Ack, FinishReason, GenerateRequest, GenerateResult, Partial, Span, Timing, extend_partial
from .worker import Role

_SOON = 1e-6
"""Events closer than this many seconds are one: loops do not tell their times apart."""


class _Job:
    """One generation here: `made` tokens under earlier versions, then from `joined` on the batch's counter."""

    __slots__ = ("answer", "cached", "joined", "length", "made", "prefill", "request", "spans")

    def __init__(self, request: GenerateRequest, length: int) -> None:
        self.request = request
        self.length = length
        self.answer: asyncio.Future[GenerateResult | Partial] = asyncio.get_running_loop().create_future()
        self.prefill = 0.0
        self.cached = 0
        self.made = 0
        self.joined: float | None = None
        self.spans: list[Span] = []


class SimWorker:
    """Generates after the time it would take.

    `length(request)` says how many tokens a generation has (default: its budget). Workers that `keep` hold running
    generations across an update and rebuild their caches; others hand back Partials at pause. `die` and `rejoin`,
    and `failing_updates`, inject faults; `tells_partial` says whether a dying worker's tokens are known.
    """

    def __init__(
        self,
        id: str,
        *,
        hardware: str = "sim",
        role: Role = "both",
        version: int = 0,
        context_limit: int = 131_072,
        prefill_rate: float = 20_000.0,
        decode_rate: float = 50.0,
        decode_total: float = 2_000.0,
        cache_tokens: int = 1_000_000,
        update_time: float = 1.0,
        keep: bool = True,
        tells_partial: bool = True,
        length: Callable[[GenerateRequest], int] | None = None,
    ) -> None:
        self.id = id
        self.hardware = hardware
        self.role: Role = role
        self.version: int | None = version
        self.context_limit = context_limit
        self.update_time = update_time
        self.keep = keep
        self.tells_partial = tells_partial
        self.failing_updates = 0
        self.staged: set[int] = set()
        self._prefill_rate = prefill_rate
        self._decode_rate = decode_rate
        self._decode_total = decode_total
        self._cache_tokens = cache_tokens
        self._length = length
        self._jobs: dict[str, _Job] = {}
        self._prefilling: deque[_Job] = deque()
        self._decoding: list[tuple[float, str]] = []
        self._progress = 0.0
        self._at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._cache: OrderedDict[str, int] = OrderedDict()
        self._cached = 0
        self._paused = False
        self._dead = False
        self._incarnation = 0

    # -- the worker's face --------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> GenerateResult | Partial:
        self._alive()
        if request.request_id in self._jobs:
            raise DuplicateRequest("request_id", f"{request.request_id!r} is running here", "unique")
        self._advance()
        budget = request.budget if self._length is None else min(self._length(request), request.budget)
        job = _Job(request, max(1, budget))
        self._jobs[request.request_id] = job
        self._enqueue(job)
        self._schedule()
        try:
            return await job.answer
        finally:
            if self._jobs.get(request.request_id) is job:  # cancelled: nothing stays behind
                self._advance()
                self._drop(job)
                self._schedule()

    async def abort(self, request_id: str) -> None:
        self._alive()
        self._advance()
        if job := self._jobs.get(request_id):
            self._drop(job, Aborted(f"request {request_id} was aborted"))
            self._schedule()

    async def interrupt(self, request_id: str) -> None:
        self._alive()
        self._advance()
        if job := self._jobs.get(request_id):
            self._hand_back(job)
            self._schedule()

    async def pause(self) -> None:
        self._alive()
        self._advance()
        self._paused = True
        for job in list(self._jobs.values()):
            self._settle(job)
            if not self.keep:
                self._hand_back(job)
        # Caches are dropped: what is kept must be prefilled again, in order of arrival.
        self._forget()
        self._prefilling.clear()
        self._decoding.clear()
        for job in self._jobs.values():
            self._enqueue(job)
        self._schedule()

    async def prefetch(self, version: int) -> None:
        self._alive()
        self.staged.add(version)

    async def update(self, version: int) -> Ack:
        await self.pause()
        self.version = None
        incarnation = self._incarnation
        await asyncio.sleep(self.update_time)
        self._alive()
        if incarnation != self._incarnation:
            raise WorkerLost(self.id, "restarted during the update")
        if self.failing_updates:
            self.failing_updates -= 1
            raise UpdateFailed(version, [Ack(self.id, version, error="told to fail")])
        self.version = version
        return Ack(self.id, version, digest=f"{version:08x}")

    async def resume(self) -> None:
        self._alive()
        if self.version is None:
            raise WrongState(f"worker {self.id} holds no version; update it first")
        self._advance()
        self._paused = False
        self._schedule()

    async def probe(self) -> int | None:
        self._alive()
        return self.version

    # -- faults -------------------------------------------------------------------------------------

    def die(self, reason: str = "killed") -> None:
        """Every running and later call raises WorkerLost, until `rejoin`."""
        self._advance()
        self._dead = True
        for job in list(self._jobs.values()):
            self._settle(job)
            partial = self._partial(job) if self.tells_partial else None
            self._drop(job, WorkerLost(self.id, reason, partial))
        self._forget()
        self._schedule()

    def rejoin(self, version: int = 0) -> None:
        """Come back empty, as a restarted process does; what ran is lost."""
        self.die("restarted")
        self._dead = False
        self._incarnation += 1
        self._paused = False
        self.version = version

    # -- the engine ---------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        return len(self._jobs)

    def _alive(self) -> None:
        if self._dead:
            raise WorkerLost(self.id, "is dead")

    def _enqueue(self, job: _Job) -> None:
        held = len(job.request.context) + job.made
        cached = self._cache.pop(job.request.trajectory_id, 0)
        self._cached -= cached
        job.cached = min(cached, held - 1)
        job.prefill = float(held - job.cached)
        job.joined = None
        self._prefilling.append(job)

    def _rate(self) -> float:
        return min(self._decode_rate, self._decode_total / max(1, len(self._decoding)))

    def _until_next(self) -> float | None:
        """Seconds until a prefill or a generation ends."""
        times = []
        if self._prefilling:
            times.append(self._prefilling[0].prefill / self._prefill_rate)
        if self._decoding:
            times.append((self._decoding[0][0] - self._progress) / self._rate())
        return max(0.0, min(times)) if times and not self._paused else None

    def _advance(self) -> None:
        """Bring the engine's state up to the loop's time."""
        left = asyncio.get_running_loop().time() - self._at
        self._at += left
        if not self._decoding:
            self._progress = 0.0  # small numbers keep the counter exact
        while (step := self._until_next()) is not None:
            step = min(step, left)
            left -= step
            self._progress += step * self._rate() if self._decoding else 0.0
            if self._prefilling:
                self._prefilling[0].prefill -= step * self._prefill_rate
            if not self._fire() and left <= 0:
                return

    def _fire(self) -> bool:
        """Handle what is due; whether there was anything."""
        fired = False
        while self._decoding and self._decoding[0][0] <= self._progress + _SOON * self._rate():
            job = self._jobs[heapq.heappop(self._decoding)[1]]
            job.joined = None
            self._make(job, job.length - job.made)
            self._finish(job)
            fired = True
        while self._prefilling and self._prefilling[0].prefill <= _SOON * self._prefill_rate:
            job = self._prefilling.popleft()
            job.prefill = 0.0
            job.joined = self._progress
            heapq.heappush(self._decoding, (self._progress + job.length - job.made, job.request.request_id))
            fired = True
        return fired

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (step := self._until_next()) is not None:
            self._timer = asyncio.get_running_loop().call_at(self._at + max(step, _SOON), self._tick)

    def _tick(self) -> None:
        self._advance()
        self._schedule()

    def _settle(self, job: _Job) -> None:
        """Count the whole tokens that a decoding job made under this version."""
        if job.joined is not None:
            self._make(job, int(self._progress - job.joined + _SOON * self._rate()))
            job.joined = self._progress

    def _make(self, job: _Job, tokens: int) -> None:
        assert self.version is not None
        if tokens > 0:
            job.spans.append(Span(self.version, job.made, job.made + tokens))
            job.made += tokens

    def _partial(self, job: _Job) -> Partial:
        start = len(job.request.resume.token_ids) if job.request.resume else 0
        tokens = [span.version for span in job.spans for _ in range(span.start, span.end)]
        return extend_partial(job.request, tokens, [-float(start + i) for i in range(job.made)], job.spans)

    def _hand_back(self, job: _Job) -> None:
        self._settle(job)
        self._drop(job, self._partial(job))

    def _finish(self, job: _Job) -> None:
        done = self._partial(job)
        reason: FinishReason = "length" if done.remaining == 0 else "stop"
        timing = Timing(cached_tokens=job.cached)
        result = GenerateResult(done.token_ids, done.logprobs, done.spans, reason, self.id, timing)
        self._remember(job.request.trajectory_id, len(job.request.context) + job.made)
        self._drop(job, result)

    def _remember(self, trajectory_id: str, tokens: int) -> None:
        self._cached += tokens - self._cache.pop(trajectory_id, 0)
        self._cache[trajectory_id] = tokens
        while len(self._cache) > 1 and self._cached > self._cache_tokens:
            self._cached -= self._cache.popitem(last=False)[1]

    def _forget(self) -> None:
        self._cache.clear()
        self._cached = 0

    def _drop(self, job: _Job, answer: GenerateResult | Partial | Exception | None = None) -> None:
        """Take a job out of the engine and answer its caller, unless that has gone."""
        del self._jobs[job.request.request_id]
        if job.prefill > 0:
            self._prefilling.remove(job)
        elif job.joined is not None:
            self._decoding = [item for item in self._decoding if item[1] != job.request.request_id]
            heapq.heapify(self._decoding)
        if job.answer.done() or answer is None:
            return
        if isinstance(answer, Exception):
            job.answer.set_exception(answer)
        else:
            job.answer.set_result(answer)
