"""Continuous batching as plain state that is told the time.

Prompts are prefilled in order of arrival, as many together as the speed allows; beside them every decoding sequence
makes a token a step. All members of the batch advance equally, so one counter of steps orders their ends, and as the
time of a step grows linearly with the resident tokens, the time of many steps has a closed form: an event costs
O(log batch), however many tokens lie before it (tests/llmproxy/test_llmproxy_engine.py: the same times as one step
after the other).

When keys and values fill the memory, the member that joined last is put back and computed again later, as far as
others took its room by then. A cache that another worker computed stays there until there is room for it here.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from math import inf, sqrt
from typing import Literal

from .cache import Cache
from .job import Job
from .speed import Pace, Speed

SOON = 1e-6
"""Events closer than this many seconds are one: loops do not tell their times apart."""
_HEADROOM = 16
"""Tokens that each sequence must have room for when one more is admitted, else it would be put back at once."""

Event = Literal["", "end", "prefilled", "full", "arrived"]


class Engine:
    """`ended` is told of each job that made its last token, or whose prefill was all that was asked."""

    def __init__(self, speed: Speed, cache_tokens: float, share_prompts: bool, ended: Callable[[Job], None]) -> None:
        self.at = 0.0
        self.version: int | None = 0
        self.preemptions = 0
        self._paused = False
        self._speed = speed
        self._capacity, self._batch, self._together = speed.capacity, speed.batch, speed.together
        self._share = share_prompts
        self._ended = ended
        self._queue: deque[Job] = deque()
        self._prompts: list[Job] = []
        self._prompts_held = 0  # tokens of their contexts
        self._left = 0.0  # tokens of the prompts being prefilled that are still to be computed
        self._total = 0.0  # tokens that they had to begin with: what a step is paced by, wherever it is interrupted
        self._depth = 0.0
        self._members: dict[Job, None] = {}  # decoding, in the order they joined
        self._ends: list[tuple[float, int, Job]] = []  # entries of jobs that left are skipped
        self._serial = 0
        self._progress = 0.0
        self._based = 0.0  # sum of the members' `base`
        self._due = 0.0  # sum of the members' `due`
        self._offered: deque[Job] = deque()  # their caches lie on other workers and wait for room
        self._arriving: list[tuple[float, int, Job]] = []
        self._arriving_held = 0  # room that is reserved for them
        self._wire_free = 0.0
        self._pins: dict[str, int] = {}
        self._pinned = 0
        self._queued = 0
        self._cache = Cache(cache_tokens)
        self._pace: Pace | None = None
        self._decoding: dict[int, Pace] = {}  # paces of so many sequences while nothing is prefilled
        self._plan: tuple[float, Event] | None = None  # when and what happens next, while nothing intervenes

    # What happens to jobs.

    def add(self, job: Job) -> None:
        self._queue.append(job)
        self._queued += job.held
        self._plan = None

    def bring(self, job: Job) -> None:
        """Its cache lies on another worker and is fetched once there is room."""
        self._offered.append(job)
        self._queued += job.held
        self._plan = None

    def drop(self, job: Job) -> None:
        """Out of the engine, wherever it is, the tokens it made counted."""
        self._plan = None
        if job in self._members:
            self._leave(job)
        elif job in self._prompts:
            self._prompts.remove(job)
            self._prompts_held -= job.held
            self._queued -= job.held
            self._left = max(0.0, self._left - job.need) if self._prompts else 0.0
            self._total -= job.need
            self._pace = None
        elif job in self._queue:
            self._queue.remove(job)
            self._queued -= job.held
        elif job in self._offered:
            self._offered.remove(job)
            self._queued -= job.held
        else:
            self._arriving = [item for item in self._arriving if item[2] is not job]
            heapq.heapify(self._arriving)
            self._arriving_held -= job.held
            self._queued -= job.held

    def restart(self, jobs: list[Job]) -> None:
        """All caches are dropped: what is kept is prefilled again, in this order."""
        for job in list(self._members):
            self._leave(job)
        self.forget()
        self._queue.clear()
        self._prompts.clear()
        self._offered.clear()
        self._arriving.clear()
        self._left, self._prompts_held, self._arriving_held, self._queued = 0.0, 0, 0, 0
        self._pace = self._plan = None
        for job in jobs:
            self.add(job)

    def forget(self) -> None:
        self._plan = None
        self._cache.clear()
        self._pins.clear()
        self._pinned = 0

    def unpin(self, key: str) -> bool:
        """A cache that was kept for another worker is free; whether it was here."""
        self._plan = None
        tokens = self._pins.pop(key, None)
        self._pinned -= tokens or 0
        return tokens is not None

    # Time.

    @property
    def paused(self) -> bool:
        """Whether time passes without steps."""
        return self._paused

    @paused.setter
    def paused(self, paused: bool) -> None:
        self._paused = paused
        self._plan = None

    def advance(self, now: float) -> float:
        """Bring the state up to `now`; seconds from there until something happens by itself, or infinity."""
        while True:
            if self._plan is None:
                wait, event = self._next()
                self._plan = (self.at + wait, event)
            else:
                wait, event = max(0.0, self._plan[0] - self.at), self._plan[1]
            left = now - self.at
            if left < 0.0:
                left = 0.0
            if wait > left + SOON:
                self._move(left)
                self.at = now
                return wait - left
            self._move(wait)
            self.at += wait
            self._plan = None
            self._handle(event)

    def repace(self) -> None:
        """From now on steps take what the speed says now."""
        self._decoding.clear()
        self._pace = self._plan = None

    @property
    def resident(self) -> float:
        """Tokens held by decoding sequences."""
        return self._based + len(self._members) * self._progress

    @property
    def pinned(self) -> int:
        """Tokens kept for other workers."""
        return self._pinned

    @property
    def backlog(self) -> int:
        """Tokens of contexts that are not here yet, neither computed nor brought, and those that may be made."""
        return int(self._queued + (self._due - len(self._members) * self._progress))

    def settle(self, job: Job) -> None:
        """Count the whole tokens that a decoding job made under this version."""
        if job.joined is not None:
            assert self.version is not None
            whole = int(self._progress - job.joined + SOON)
            made = min(whole, job.length - job.made)
            job.joined += made
            job.make(made, self.version)

    def _next(self) -> tuple[float, Event]:
        wait, event = inf, ""
        if not self._paused:
            if self._queue and not self._prompts:
                self._admit()
            if self._offered:
                self._fetch()
            steps, event = self._next_steps()
            wait = self._seconds(steps)
        if self._arriving and (until := max(0.0, self._arriving[0][0] - self.at)) <= wait:
            return until, "arrived"
        return wait, event  # type: ignore[return-value]

    def _next_steps(self) -> tuple[float, Event]:
        steps: float = inf
        event: Event = ""
        members = len(self._members)
        if members:
            while self._ends[0][1] != self._ends[0][2].serial:
                heapq.heappop(self._ends)
            steps, event = max(0.0, self._ends[0][0] - self._progress), "end"
            room = self._capacity - self.resident - self._reserved()
            if members > 1 and room < steps * members:
                steps, event = max(0.0, room / members), "full"
        if self._prompts:
            chunk = self._current_pace().chunk
            until = self._left / chunk if self._left > SOON else 0.0
            if until < steps:
                steps, event = until, "prefilled"
        return steps, event

    def _current_pace(self) -> Pace:
        if self._pace is None:
            members = len(self._members)
            if self._prompts:
                self._pace = self._speed.pace(members, self._total, self._depth)
            else:
                self._pace = self._decoding.get(members) or self._speed.pace(members, 0.0, self._depth)
                self._decoding[members] = self._pace
        return self._pace

    def _seconds(self, steps: float) -> float:
        if steps == inf or steps == 0.0:
            return steps
        pace = self._current_pace()
        return steps * (pace.base + pace.slope * (self.resident + len(self._members) * steps / 2))

    def _move(self, seconds: float) -> None:
        """So much time passes without an event."""
        if seconds <= 0.0 or self._paused or not (self._members or self._prompts):
            return
        pace = self._current_pace()
        first = pace.base + pace.slope * self.resident
        steps = 2 * seconds / (first + sqrt(first * first + 2 * pace.slope * len(self._members) * seconds))
        self._progress += steps if self._members else 0.0
        if self._prompts:
            self._left = max(0.0, self._left - steps * pace.chunk)

    def _handle(self, event: Event) -> None:
        if event == "end":
            job = heapq.heappop(self._ends)[2]
            assert self.version is not None
            job.make(job.length - job.made, self.version)
            self._leave(job)
            self._keep(job)
            self._ended(job)
        elif event == "prefilled":
            self._prefilled()
        elif event == "full":
            self.preemptions += 1
            job = next(reversed(self._members))
            self._leave(job)
            self._keep(job)
            self._queue.appendleft(job)
            self._queued += job.held
        elif event == "arrived":
            self._arrived(heapq.heappop(self._arriving)[2])

    # Into and out of the batch.

    def _admit(self) -> None:
        """Choose what to prefill next, now that the prompts before are done."""
        self._trim()
        total, reserved = 0.0, 0
        room = self._room()
        while self._queue:
            job = self._queue[0]
            running = len(self._members) + len(self._prompts) + len(self._arriving) + 1
            alone = not (self._members or self._prompts or self._arriving or self._pinned)
            fits = alone or reserved + job.held + _HEADROOM * running <= room
            known = min(self._known(job), job.held - 1)
            together = not self._prompts or total + job.held - known <= self._together
            if not (fits and together and running <= self._batch):
                break
            self._queue.popleft()
            job.found(known)
            job.need = float(job.held - known)
            self._cache.take(job.request.trajectory_id)
            total += job.need
            reserved += job.held
            self._prompts.append(job)
        if self._prompts:
            self._prompts_held = reserved
            self._left = self._total = total
            self._depth = sum(job.known + job.need / 2 for job in self._prompts) / len(self._prompts)
            self._pace = None
            self._trim()

    def _fetch(self) -> None:
        """Have the caches sent that there is room for, in order; behind what is waiting for room itself."""
        while self._offered and (self._prompts or not self._queue):
            job = self._offered[0]
            running = len(self._members) + len(self._prompts) + len(self._arriving) + 1
            fits = running == 1 or job.held + _HEADROOM * running <= self._room()
            if not fits or running > self._batch:
                break
            self._offered.popleft()
            job.known = min(self._cache.take(job.request.trajectory_id), job.held)  # is here and is not sent
            self._wire_free = max(self.at, self._wire_free) + self._speed.transfer(job.held - job.known)
            self._serial += 1
            heapq.heappush(self._arriving, (self._wire_free, self._serial, job))
            self._arriving_held += job.held
            self._trim()

    def _prefilled(self) -> None:
        prompts, self._prompts = self._prompts, []
        self._prompts_held, self._left, self._pace = 0, 0.0, None
        for job in prompts:
            self._queued -= job.held
            if job.key is not None:
                self._cache.keep(job.key, job.held)
            if job.only_prefill:
                self._pins[job.request.request_id] = job.held
                self._pinned += job.held
                self._cache.keep(job.request.trajectory_id, job.held)
                self._ended(job)
            else:
                self._join(job)
        self._trim()

    def _join(self, job: Job) -> None:
        self._serial += 1
        job.serial = self._serial
        job.joined = self._progress
        job.base = job.held - self._progress
        job.due = job.request.budget - job.made + self._progress
        self._based += job.base
        self._due += job.due
        self._members[job] = None
        heapq.heappush(self._ends, (self._progress + job.length - job.made, job.serial, job))
        self._pace = None

    def _leave(self, job: Job) -> None:
        self._trim()  # the members never hold more than now
        self.settle(job)
        del self._members[job]
        job.joined, job.serial = None, 0
        self._based -= job.base
        self._due -= job.due
        self._pace = None
        if not self._members:  # small numbers keep the counter exact
            self._progress = self._based = self._due = 0.0
            self._ends.clear()

    def _arrived(self, job: Job) -> None:
        handoff = job.request.handoff
        assert handoff is not None and handoff.version == self.version  # never tokens from a cache of other weights
        self._queued -= job.held
        self._arriving_held -= job.held
        if handoff.params["source"].taken(handoff.params["key"]):
            job.found(job.held)
            self._join(job)
        else:  # it was lost; what was here before still is
            self._cache.keep(job.request.trajectory_id, job.known)
            self.add(job)

    def _room(self) -> float:
        """Tokens that no sequence holds and nobody was promised."""
        return self._capacity - self.resident - self._reserved()

    def _reserved(self) -> int:
        return self._pinned + self._prompts_held + self._arriving_held

    def _known(self, job: Job) -> int:
        known = self._cache[job.request.trajectory_id]
        if not known and self._share:
            job.key = job.key or hash(tuple(job.request.prompt_ids))
            known = self._cache[job.key]
        return known

    def _keep(self, job: Job) -> None:
        self._cache.keep(job.request.trajectory_id, job.held)
        self._trim()

    def _trim(self) -> None:
        if self._cache.tokens:
            self._cache.trim(self._room())
