"""A worker on the loop's own clock, for control-plane tests and simulation.

A token's id is the version that made it and its log-probability is minus its position, so that whoever holds a
result can check spans and continuity (tests/llmproxy/test_llmproxy_sim.py). With a virtual-time loop no time passes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf

from llmproxy.errors import Aborted, DuplicateRequest, UpdateFailed, WorkerLost, WrongState
from llmproxy.values import (
    Ack,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Handoff,
    Partial,
    Timing,
    extend_partial,
)
from llmproxy.worker import Role

from .engine import SOON, Engine
from .job import Job
from .speed import Rates, Speed

_TABLE: list[float] = []

Answer = GenerateResult | Partial | Handoff


class SimWorker:
    """Generates after the time it would take: that of `speed`, or of the three rates when it is not given.

    `length(request)` says how many tokens a generation has (default: its budget). Workers that `keep` hold running
    generations across an update and rebuild their caches; others hand back Partials at pause. With `share_prompts`
    a first prompt is found in the cache by its content too, as members of a group share it. Roles "prefill" and
    "decode" hand caches over as real engines do.

    `die` and `rejoin`, `freeze` and `thaw`, and `failing_updates` inject faults; `tells_partial` says whether a dying
    worker's tokens are known.
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
        cache_tokens: float = 1_000_000,
        update_time: float = 1.0,
        keep: bool = True,
        tells_partial: bool = True,
        length: Callable[[GenerateRequest], int] | None = None,
        speed: Speed | None = None,
        share_prompts: bool = False,
    ) -> None:
        self.id = id
        self.hardware = hardware
        self.role: Role = role
        self.context_limit = context_limit
        self.update_time = update_time
        self.keep = keep
        self.tells_partial = tells_partial
        self.failing_updates = 0
        self.staged: set[int] = set()
        self._length = length
        self._jobs: dict[str, Job] = {}
        self._engine = Engine(
            speed or Rates(prefill_rate, decode_rate, decode_total), cache_tokens, share_prompts, self._ended
        )
        self._engine.version = version
        self._timer: asyncio.TimerHandle | None = None
        self._dead = False
        self._thawed: asyncio.Event | None = None
        self._incarnation = 0

    @property
    def version(self) -> int | None:
        return self._engine.version

    # -- the worker's face --------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> GenerateResult | Partial:
        handoff = request.handoff
        if handoff is not None and (self._engine.paused or handoff.version != self.version):
            _take(request)
            return extend_partial(request, [], [], ())  # that cache is of other weights than the tokens would be
        length = request.budget if self._length is None else min(self._length(request), request.budget)
        answer = await self._run(Job(request, max(1, length), _future()))
        assert not isinstance(answer, Handoff)
        return answer

    async def prefill(self, request: GenerateRequest) -> Handoff | None:
        answer = await self._run(Job(request, 0, _future(), only_prefill=True))
        return answer if isinstance(answer, Handoff) else None

    async def release(self, handoff: Handoff) -> None:
        await self._answering()
        handoff.params["source"].taken(handoff.params["key"])

    def backlog(self) -> int:
        return self._engine.backlog

    async def abort(self, request_id: str) -> None:
        await self._answering()
        self._advance()
        if job := self._jobs.get(request_id):
            self._drop(job, Aborted(f"request {request_id} was aborted"))
            self._schedule()

    async def interrupt(self, request_id: str) -> None:
        await self._answering()
        self._advance()
        if job := self._jobs.get(request_id):
            self._hand_back(job)
            self._schedule()

    async def pause(self) -> None:
        await self._answering()
        self._advance()
        self._engine.paused = True
        for job in list(self._jobs.values()):
            self._engine.settle(job)
            if not self.keep or (job.request.handoff is not None and not job.made):
                self._hand_back(job)
        self._engine.restart(list(self._jobs.values()))
        self._schedule()

    async def prefetch(self, version: int) -> None:
        await self._answering()
        self.staged.add(version)

    async def update(self, version: int) -> Ack:
        await self.pause()
        self._engine.version = None
        incarnation = self._incarnation
        await asyncio.sleep(self.update_time)
        await self._answering()
        if incarnation != self._incarnation:
            raise WorkerLost(self.id, "restarted during the update")
        if self.failing_updates:
            self.failing_updates -= 1
            raise UpdateFailed(version, [Ack(self.id, version, error="told to fail")])
        self._engine.version = version
        return Ack(self.id, version, digest=f"{version:08x}")

    async def resume(self) -> None:
        await self._answering()
        if self.version is None:
            raise WrongState(f"worker {self.id} holds no version; update it first")
        self._advance()
        self._engine.paused = self._thawed is not None
        self._schedule()

    async def probe(self) -> int | None:
        await self._answering()
        return self.version

    # -- faults -------------------------------------------------------------------------------------

    def die(self, reason: str = "killed") -> None:
        """Every running and later call raises WorkerLost, until `rejoin`."""
        self._advance()
        self._dead = True
        for job in list(self._jobs.values()):
            self._engine.settle(job)
            partial = self._partial(job) if self.tells_partial else None
            self._drop(job, WorkerLost(self.id, reason, partial))
        self._engine.forget()
        self._schedule()
        self.thaw()

    def rejoin(self, version: int = 0) -> None:
        """Come back empty, as a restarted process does; what ran is lost."""
        self.die("restarted")
        self._dead = False
        self._incarnation += 1
        self._engine.paused = False
        self._engine.version = version

    def freeze(self) -> None:
        """Accept all and answer nothing, as a stopped process does, until `thaw`."""
        if self._thawed is None and not self._dead:
            self._advance()
            self._thawed = asyncio.Event()
            self._was_paused, self._engine.paused = self._engine.paused, True
            self._schedule()

    def thaw(self) -> None:
        if self._thawed is not None:
            self._advance()
            self._thawed.set()
            self._thawed = None
            self._engine.paused = self._was_paused
            self._schedule()

    def repace(self) -> None:
        """The speed that it was given says other times from now on."""
        self._advance()
        self._engine.repace()
        self._schedule()

    # -- inside -------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        return len(self._jobs)

    @property
    def preemptions(self) -> int:
        """How often a generation lost its cache for want of memory."""
        return self._engine.preemptions

    @property
    def pinned(self) -> int:
        """Tokens kept for other workers."""
        return self._engine.pinned

    async def _answering(self) -> None:
        while self._thawed is not None:
            await self._thawed.wait()
        if self._dead:
            raise WorkerLost(self.id, "is dead")

    async def _run(self, job: Job) -> Answer:
        if self._dead:
            raise WorkerLost(self.id, "is dead")
        id = job.request.request_id
        if id in self._jobs:
            raise DuplicateRequest("request_id", f"{id!r} is running here", "unique")
        self._advance()
        self._jobs[id] = job
        if job.request.handoff is None:
            self._engine.add(job)
        else:
            self._engine.bring(job)
        self._schedule()
        try:
            return await job.answer
        finally:
            if self._jobs.get(id) is job:  # cancelled: nothing stays behind
                self._advance()
                if self._jobs.get(id) is job:  # that may have been its last token
                    self._drop(job)
                self._schedule()

    def taken(self, key: str) -> bool:
        """Another worker has the cache that was kept for it, or will not come; whether it was here."""
        self._advance()
        was_here = not self._dead and self._engine.unpin(key)
        self._schedule()
        return was_here

    def _advance(self) -> float:
        return self._engine.advance(asyncio.get_running_loop().time())

    def _schedule(self) -> None:
        """Wake when something happens by itself. A timer that is early wakes for nothing, and is left alone."""
        wait = self._advance()
        if wait == inf:
            return
        when = self._engine.at + max(wait, SOON)
        if self._timer is not None:
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(when, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._schedule()

    def _ended(self, job: Job) -> None:
        if job.only_prefill:
            assert self.version is not None
            key = job.request.request_id
            answer: Answer = Handoff(self.id, self.version, {"source": self, "key": key}, job.cached or 0)
        else:
            done = self._partial(job)
            reason: FinishReason = "length" if done.remaining == 0 else "stop"
            timing = Timing(cached_tokens=job.cached or 0)
            answer = GenerateResult(done.token_ids, done.logprobs, done.spans, reason, self.id, timing)
        del self._jobs[job.request.request_id]
        if not job.answer.done():
            job.answer.set_result(answer)

    def _partial(self, job: Job) -> Partial:
        start = len(job.request.resume.token_ids) if job.request.resume else 0
        tokens: list[int] = []
        for span in job.spans:
            tokens += [span.version] * (span.end - span.start)
        return extend_partial(job.request, tokens, _positions(start, start + job.made), job.spans)

    def _hand_back(self, job: Job) -> None:
        self._engine.settle(job)
        self._drop(job, self._partial(job))

    def _drop(self, job: Job, answer: Partial | Exception | None = None) -> None:
        """Take a job out of the engine and answer its caller, unless that has gone."""
        if self._jobs.pop(job.request.request_id, None) is not job:
            return  # it ended when another was dropped, which left the rest of the batch faster
        self._engine.drop(job)
        _take(job.request)
        if job.answer.done() or answer is None:
            return
        if isinstance(answer, Exception):
            job.answer.set_exception(answer)
        else:
            job.answer.set_result(answer)


def _positions(start: int, end: int) -> list[float]:
    """Minus each position, from a table that grows: slices are cheaper than numbers."""
    if end > len(_TABLE):
        _TABLE.extend(-float(position) for position in range(len(_TABLE), 2 * end))
    return _TABLE[start:end]


def _take(request: GenerateRequest) -> None:
    """The cache that waits for this request, if any still does, will not be fetched."""
    if request.handoff is not None:
        request.handoff.params["source"].taken(request.handoff.params["key"])


def _future() -> asyncio.Future[Answer]:
    return asyncio.get_running_loop().create_future()
