"""Requests in flight: each is placed, carried from worker to worker, and taken away, in its caller's task.

- Between the gate's check and a request's dispatch nothing is awaited, so a request admitted while a suspend begins
  is either at its worker before the pause, or waits (test_llmproxy_interleavings.py tries every order).
- To take a request away (abort, interrupt, move) its task's wait is cancelled, as `asyncio.timeout` does; a
  cancellation from outside passes through unchanged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from secrets import token_hex

from msgspec.structs import replace

from .config import ProxyConfig
from .errors import Aborted, Closed, Interrupted, NoWorker, RetriesExhausted, WorkerLost
from .fleet import Fleet, Slot
from .gate import Gate
from .ledger import End, Entry, Ledger, Pull
from .prefills import Prefills
from .routing import Router
from .values import GenerateRequest, GenerateResult, Partial, Timing

_log = logging.getLogger(__name__)
_RANK: Sequence[Pull] = ("", "reclaim", "interrupt", "abort", "close")


class Flights:
    """Carries requests over the workers that the gate lets serve. `on_lost` is told of lost workers."""

    def __init__(
        self,
        gate: Gate,
        fleet: Fleet,
        router: Router,
        prefills: Prefills,
        config: ProxyConfig,
        on_lost: Callable[[Slot, str], None],
    ) -> None:
        self.ledger = Ledger()
        self.lost = 0
        self._gate = gate
        self._fleet = fleet
        self._router = router
        self._prefills = prefills
        self._config = config
        self._on_lost = on_lost
        self._waiting: dict[Entry, asyncio.Future[None]] = {}

    async def run(self, request: GenerateRequest) -> GenerateResult:
        """Admit a request and carry it to its end."""
        if not request.request_id:
            request = replace(request, request_id=token_hex(16))
        task = asyncio.current_task()
        assert task is not None
        entry = self.ledger.admit(request, _now(), task)
        end: End = "failed"
        try:
            result = await self._drive(entry)
            end = "finished"
            return result
        except (Aborted, Interrupted, asyncio.CancelledError):
            end = "aborted"
            raise
        finally:
            _calm(entry)
            self.ledger.end(entry, end, _now())
            _announce(entry)

    async def abort(self, id: str) -> bool:
        entry = self.ledger.find(id)
        if entry is None:
            return False
        self._kick(entry, "abort")
        await _left(entry)
        return entry.pulled == "abort"

    async def interrupt(self, id: str) -> Partial | None:
        entry = self.ledger.find(id)
        if entry is None:
            return None
        await self._ask_to_leave(entry, "interrupt")
        return entry.partial if entry.interrupted else None

    async def reclaim(self, slot: Slot, *, silent: bool = False) -> None:
        """Move the requests of a worker that may not serve any more; a silent one is not asked for their tokens."""
        entries = self.ledger.on(slot)
        if silent:
            for entry in entries:
                self._kick(entry, "reclaim")
        await asyncio.gather(*(self._ask_to_leave(entry, "reclaim", slot) for entry in entries))

    def allow(self, version: int) -> None:
        """Requests at workers may have tokens of this version too from now on."""
        for entry in self.ledger.entries():
            entry.versions.add(version)

    async def end(self) -> None:
        """End all requests with Closed."""
        entries = self.ledger.entries()
        for entry in entries:
            self._kick(entry, "close")
        await asyncio.gather(*(_left(entry) for entry in entries))

    def wake(self) -> None:
        """Workers or the gate changed: whoever waits for one looks again, first come first served."""
        waiting, self._waiting = self._waiting, {}
        for woken in waiting.values():
            if not woken.done():
                woken.set_result(None)

    # A request's life, in its caller's task.

    async def _drive(self, entry: Entry) -> GenerateResult:
        while True:
            try:
                slot = await self._place(entry)
                if entry.prefill_slot is not None and not await self._prefill(entry, entry.prefill_slot):
                    answer: GenerateResult | Partial = entry.partial
                else:
                    answer = await slot.worker.generate(entry.request)
            except asyncio.CancelledError:
                if not entry.kicked or entry.task.cancelling() > entry.cancelling + 1:
                    raise  # from outside
                if entry.slot is not None:
                    self._requeue(entry, None)
            except WorkerLost as lost:
                self._survive(entry, lost)
            else:
                if wrong := _forbidden(entry, answer):
                    self._survive(entry, WorkerLost(slot.id, f"it answered with version {wrong}"))
                elif isinstance(answer, GenerateResult):
                    return self._finished(entry, slot, answer)
                else:
                    self._requeue(entry, answer)
            _calm(entry)
            _obey_pull(entry)
            if entry.request.budget <= 0:
                return self._exhausted(entry)

    async def _place(self, entry: Entry) -> Slot:
        """Wait until a worker may take the request; it has been dispatched when this returns."""
        deadline: float | None = None
        while True:
            now = _now()
            if self._gate.suspended:
                deadline = None
            else:
                slot = self._router.choose(entry.request, self._fleet)
                if slot is not None:
                    self.ledger.dispatch(entry, slot, now, self._prefills.choose(entry.request, slot))
                    entry.versions = {self._gate.version}
                    return slot
                deadline = deadline or now + self._config.patience
            await self._woken(entry, deadline)

    async def _woken(self, entry: Entry, deadline: float | None) -> None:
        self._waiting[entry] = woken = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout_at(deadline):
                await woken
        except TimeoutError:
            raise NoWorker(self._why_none(entry.request)) from None
        finally:
            if self._waiting.get(entry) is woken:
                del self._waiting[entry]

    async def _prefill(self, entry: Entry, slot: Slot) -> bool:
        """The first phase; whether the second may begin, which nothing is awaited before."""
        handoff = await self._prefills.run(entry.request, slot)
        if handoff is None:
            return False
        target = entry.slot
        assert target is not None
        if handoff.version not in entry.versions:
            await self._prefills.release(handoff, target, self._fleet)
            raise WorkerLost(slot.id, f"it prefilled under version {handoff.version}")
        self.ledger.prefilled(entry, handoff, _now())
        if target.serving and not self._gate.suspended and handoff.version == self._gate.version:
            return True
        await self._prefills.release(handoff, target, self._fleet)
        return False

    def _survive(self, entry: Entry, lost: WorkerLost) -> None:
        slot = entry.prefill_slot or entry.slot
        assert slot is not None
        trusted = lost.partial is not None and not _forbidden(entry, lost.partial)
        self._requeue(entry, lost.partial if trusted else None)
        self.lost += 1
        self._on_lost(slot, lost.reason)
        entry.losses += 1
        if entry.losses >= self._config.attempts and not entry.pulled and entry.request.budget > 0:
            raise RetriesExhausted(entry.request.request_id, entry.losses, lost) from lost

    def _requeue(self, entry: Entry, partial: Partial | None) -> None:
        self.ledger.requeue(entry, partial, _now())
        _announce(entry)

    def _finished(self, entry: Entry, slot: Slot, answer: GenerateResult) -> GenerateResult:
        slot.strikes = 0
        handoff = entry.request.handoff
        cached = answer.timing.cached_tokens if handoff is None else handoff.cached_tokens
        answer = replace(answer, timing=_timing(entry, cached))
        self._router.served(entry.request, slot, answer)
        self._prefills.served(entry.request, slot, answer)
        return answer

    def _exhausted(self, entry: Entry) -> GenerateResult:
        """It left its worker after the last token of its budget: nothing is left to generate."""
        done = entry.partial
        return GenerateResult(done.token_ids, done.logprobs, done.spans, "length", entry.worker, _timing(entry, 0))

    def _why_none(self, request: GenerateRequest) -> str:
        fenced = self._gate.fenced(slot.id for slot in self._fleet)
        known = f"{len(self._fleet)} known{fenced}"
        return f"no worker took task {request.task!r} within {self._config.patience} s: {known}"

    # Taking requests away from where they are.

    def _kick(self, entry: Entry, why: Pull) -> None:
        """Cancel the wait that the request's task is in; `_drive` takes it from there."""
        if not entry.live:
            return
        entry.pulled = max(entry.pulled, why, key=_RANK.index)
        if not entry.kicked:
            entry.kicked = True
            entry.task.cancel()

    async def _ask_to_leave(self, entry: Entry, why: Pull, slot: Slot | None = None) -> None:
        """Have the worker hand back the partial tokens; where it does not in time, leave without them.

        With `slot` only that one is to be left: a request that has gone on elsewhere stays there.
        """
        if not entry.live or slot not in (None, entry.slot, entry.prefill_slot):
            return
        entry.pulled = max(entry.pulled, why, key=_RANK.index)
        left = _leaving(entry)
        if entry.slot is not None and entry.prefill_slot is None and not entry.kicked:
            try:
                async with asyncio.timeout(self._config.answer):
                    await entry.slot.worker.interrupt(entry.request.request_id)
                    return await asyncio.shield(left)
            except Exception as error:  # whatever keeps the worker from handing them back
                if left.done():
                    return
                _log.warning("request %s leaves without its tokens: %r", entry.request.request_id, error)
        self._kick(entry, why)
        await asyncio.shield(left)


def _forbidden(entry: Entry, answer: GenerateResult | Partial) -> set[int]:
    """Versions of new tokens that were not allowed while the request was at its worker.

    A worker that restarted unnoticed has old weights and raises no error: only its answer tells.
    """
    before = len(entry.request.resume.token_ids) if entry.request.resume else 0
    return {span.version for span in answer.spans if span.end > before} - entry.versions


def _timing(entry: Entry, cached: int) -> Timing:
    running = entry.ran_for + (_now() - entry.since if entry.slot is not None else 0.0)
    return Timing(entry.queued_for, running, entry.placements, cached, entry.prefilled_for, entry.prefill_worker)


def _calm(entry: Entry) -> None:
    """Take back the proxy's own cancellation, once it did its work."""
    if entry.kicked:
        entry.kicked = False
        entry.task.uncancel()


def _obey_pull(entry: Entry) -> None:
    """A request that left its place: go on elsewhere, or end as whoever pulled it wanted."""
    request_id = entry.request.request_id
    match entry.pulled:
        case "close":
            raise Closed(f"request {request_id} ended because the proxy closed")
        case "abort":
            raise Aborted(f"request {request_id} of trajectory {entry.request.trajectory_id} was aborted")
        case "interrupt":
            entry.interrupted = True
            raise Interrupted(request_id, entry.partial)
    entry.pulled = ""


async def _left(entry: Entry) -> None:
    """Wait until the request has left its worker, or has ended."""
    if entry.live:
        await asyncio.shield(_leaving(entry))


def _leaving(entry: Entry) -> asyncio.Future[None]:
    """Done once the request has left the place where it is now."""
    if entry.left is None:
        entry.left = asyncio.get_running_loop().create_future()
    return entry.left


def _announce(entry: Entry) -> None:
    """Tell those who wait for it to leave."""
    if entry.left is not None:
        entry.left.set_result(None)
        entry.left = None


def _now() -> float:
    return asyncio.get_running_loop().time()
