"""Places generations on workers and carries them through suspends, updates, failures and moves.

Invariants, driven together by tests/llmproxy/test_llmproxy_machine.py:
- every admitted request ends exactly once: a result, or one typed error;
- between the gate's check and a request's dispatch nothing is awaited, so a request admitted while a suspend
  begins is either at its worker before the pause, or waits (every interleaving: test_llmproxy_interleavings.py);
- tokens come only from workers that proved the allowed version, and spans say which.

A request runs in its caller's task. To take it away (abort, interrupt, move) the proxy notes why and cancels that
task's wait, as `asyncio.timeout` does; a cancellation from outside passes through unchanged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Literal
from uuid import uuid4

from msgspec import Struct
from msgspec.structs import replace

from .checks import check_request
from .errors import (
    Aborted,
    Closed,
    Interrupted,
    NoWorker,
    RetriesExhausted,
    UpdateFailed,
    WorkerLost,
    WrongState,
)
from .fleet import Fleet, Slot
from .gate import Gate
from .ledger import End, Entry, Ledger, Pull
from .routing import AffinityRouter, Router
from .values import Ack, GenerateRequest, GenerateResult, Partial, Timing
from .worker import Worker

_log = logging.getLogger(__name__)
_RANK: Sequence[Pull] = ("", "reclaim", "interrupt", "abort", "close")


class ProxyConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds of the proxy; seconds where a time is meant."""

    on_failure: Literal["fence", "fail"] = "fence"
    """A worker fails an update: fence it and go on, or fail the update and stay suspended."""
    attempts: int = 4
    """Workers that one request may lose before it fails."""
    patience: float = 60.0
    """How long a request waits for a worker to serve before NoWorker, while the gate is open."""
    answer: float = 30.0
    """How long a worker may take to answer pause, resume, interrupt, abort or probe."""
    update: float = 600.0
    """How long a worker may take to load a version."""
    probe_first: float = 0.1
    """Delay of the first probe of a fenced worker; each further one waits twice as long."""
    probe_every: float = 10.0
    """The longest delay between probes of a fenced worker."""


class WorkerStats(Struct, frozen=True):
    """One worker as the proxy sees it; `fenced` says why it gets no traffic."""

    id: str
    hardware: str
    version: int | None
    load: int
    running: int
    fenced: str


class ProxyStats(Struct, frozen=True):
    """A snapshot; `requests` are the ledger's counts."""

    version: int
    suspended: bool
    requests: dict[str, int]
    lost: int
    router: dict[str, int]
    workers: list[WorkerStats]


class LLMProxy:
    """A trajectory-level gateway over workers, embeddable in any asyncio program.

    The proxy does not own its workers: `close` ends its requests and tasks and leaves them running.
    """

    def __init__(
        self,
        workers: Iterable[Worker] = (),
        *,
        router: Router | None = None,
        config: ProxyConfig = ProxyConfig(),  # noqa: B008 - immutable
        version: int | None = None,
    ) -> None:
        workers = list(workers)
        held = [worker.version for worker in workers if worker.version is not None]
        self._config = config
        self._router = router or AffinityRouter()
        self._gate = Gate(max(held, default=0) if version is None else version)
        self._fleet = Fleet()
        self._ledger = Ledger()
        self._waiting: dict[Entry, asyncio.Future[None]] = {}
        self._mending: dict[str, asyncio.Task[None]] = {}
        self._moving: set[asyncio.Task[None]] = set()
        self._phase = asyncio.Lock()
        self._lost = 0
        self._closed = False
        for worker in workers:
            self.add_worker(worker)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Run one generation to its end, wherever and under however many versions that takes."""
        if self._closed:
            raise Closed("the proxy is closed")
        check_request(request, self._fleet.context_limit or request.tokens)
        if not request.request_id:
            request = replace(request, request_id=uuid4().hex)
        task = asyncio.current_task()
        assert task is not None
        entry = self._ledger.admit(request, self._now(), task)
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
            self._ledger.end(entry, end, self._now())
            _announce(entry)

    async def abort(self, id: str) -> bool:
        """End the request of a trajectory (or of a request id) for good; False when none is in flight."""
        entry = self._ledger.find(id)
        if entry is None:
            return False
        self._kick(entry, "abort")
        await _left(entry)
        return entry.pulled == "abort"

    async def interrupt(self, id: str) -> Partial | None:
        """Stop the generation of a trajectory (or request id) and keep what it made.

        None when none is in flight, or when it ended first.
        """
        entry = self._ledger.find(id)
        if entry is None:
            return None
        while entry.live:
            await self._ask_to_leave(entry, "interrupt")
        return entry.partial if entry.interrupted else None

    # A request's life, in its caller's task.

    async def _drive(self, entry: Entry) -> GenerateResult:
        while True:
            try:
                slot = await self._place(entry)
                answer = await slot.worker.generate(entry.request)
            except asyncio.CancelledError:
                if not entry.kicked or entry.task.cancelling() > entry.cancelling + 1:
                    raise  # from outside
                if entry.slot is not None:
                    self._requeue(entry, None)
            except WorkerLost as lost:
                self._survive(entry, lost)
            else:
                if isinstance(answer, GenerateResult):
                    return self._finished(entry, slot, answer)
                self._requeue(entry, answer)
            _calm(entry)
            _obey_pull(entry)
            if entry.request.budget <= 0:
                return self._exhausted(entry)

    async def _place(self, entry: Entry) -> Slot:
        """Wait until a worker may take the request; it has been dispatched when this returns."""
        deadline: float | None = None
        while True:
            now = self._now()
            if not self._gate.suspended:
                slot = self._router.choose(entry.request, self._fleet)
                if slot is not None:
                    self._ledger.dispatch(entry, slot, now)
                    return slot
                deadline = deadline or now + self._config.patience
            else:
                deadline = None
            await self._woken(entry, deadline)

    async def _woken(self, entry: Entry, deadline: float | None) -> None:
        self._waiting[entry] = woken = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout_at(deadline):
                await woken
        except TimeoutError:
            raise NoWorker(self._why_no_worker(entry.request)) from None
        finally:
            self._waiting.pop(entry, None)

    def _survive(self, entry: Entry, lost: WorkerLost) -> None:
        slot = entry.slot
        assert slot is not None
        self._requeue(entry, lost.partial)
        self._lost += 1
        self._fence(slot, lost.reason)
        entry.losses += 1
        if entry.losses >= self._config.attempts and not entry.pulled:
            raise RetriesExhausted(entry.request.request_id, entry.losses, lost) from lost

    def _requeue(self, entry: Entry, partial: Partial | None) -> None:
        self._ledger.requeue(entry, partial, self._now())
        _announce(entry)

    def _finished(self, entry: Entry, slot: Slot, answer: GenerateResult) -> GenerateResult:
        self._router.served(entry.request, slot)
        running = entry.ran_for + self._now() - entry.since
        return replace(answer, timing=self._timing(entry, running, answer.timing.cached_tokens))

    def _exhausted(self, entry: Entry) -> GenerateResult:
        """The worker was lost after the last token of the budget: nothing is left to generate."""
        done = entry.partial
        timing = self._timing(entry, entry.ran_for, 0)
        return GenerateResult(done.token_ids, done.logprobs, done.spans, "length", entry.worker, timing)

    def _timing(self, entry: Entry, running: float, cached: int) -> Timing:
        return Timing(entry.queued_for, running, entry.placements, cached)

    # Taking requests away from where they are.

    def _kick(self, entry: Entry, why: Pull) -> None:
        """Cancel the wait that the request's task is in; `_drive` takes it from there."""
        if not entry.live:
            return
        entry.pulled = max(entry.pulled, why, key=_RANK.index)
        if not entry.kicked:
            entry.kicked = True
            entry.task.cancel()

    async def _ask_to_leave(self, entry: Entry, why: Pull) -> None:
        """Have the worker hand back the partial tokens; where it does not in time, leave without them."""
        entry.pulled = max(entry.pulled, why, key=_RANK.index)
        if entry.slot is not None:
            try:
                async with asyncio.timeout(self._config.answer):
                    await entry.slot.worker.interrupt(entry.request.request_id)
                    return await _left(entry)
            except Exception as error:  # a worker that cannot hand them back
                _log.warning("request %s leaves without its tokens: %r", entry.request.request_id, error)
        self._kick(entry, why)
        await _left(entry)

    async def _reclaim(self, slot: Slot) -> None:
        """Move the requests of a worker that may not serve them any more."""
        entries = self._ledger.on(slot)
        await asyncio.gather(*(self._ask_to_leave(entry, "reclaim") for entry in entries))

    # Weights.

    async def suspend(self) -> None:
        """From the call on nothing new is placed; when it returns, no worker generates."""
        self._gate.suspend()
        async with self._phase:
            await self._all([slot for slot in self._fleet if slot.serving], lambda worker: worker.pause())

    async def prefetch(self, version: int) -> list[Ack]:
        """Have every worker stage `version` while it generates; the acknowledgements tell who could not."""

        async def stage(slot: Slot) -> Ack:
            try:
                await slot.worker.prefetch(version)
            except Exception as error:  # whatever went wrong is this worker's answer
                return Ack(slot.id, version, error=f"{type(error).__name__}: {error}")
            return Ack(slot.id, version)

        return await asyncio.gather(*(stage(slot) for slot in self._fleet))

    async def update(self, version: int) -> list[Ack]:
        """Load `version` on every worker, fenced ones too, and make it the only one that may serve.

        A worker that fails is fenced (`on_failure="fence"`), its acknowledgement saying why; with `"fail"`, or
        when none succeeds, raises UpdateFailed and the proxy stays suspended until an update succeeds.
        """
        if not self._gate.suspended:
            raise WrongState("update needs a suspended proxy; call suspend first")
        async with self._phase:
            await self._stop(self._mending.values())
            self._mending.clear()
            acks = await asyncio.gather(*(self._update(slot, version) for slot in self._fleet))
        self.accept(version, acks)
        return acks

    def accept(self, version: int, acks: Sequence[Ack]) -> None:
        """Take over the acknowledgements of an update that another proxy over the same workers made."""
        held = {ack.worker for ack in acks if ack.version == version and not ack.error}
        errors = {ack.worker: ack.error for ack in acks if ack.error}
        missed = [slot for slot in self._fleet if slot.id not in held]
        if missed and (self._config.on_failure == "fail" or len(missed) == len(self._fleet)):
            self._gate.refuse()
            failures = [Ack(s.id, version, error=errors.get(s.id, "did not acknowledge")) for s in missed]
            raise UpdateFailed(version, failures)
        self._gate.allow(version)
        self._router.flushed()
        for slot in self._fleet:
            if slot.id in held:
                self._gate.prove(slot.id, version)
        self._refresh()
        for slot in missed:
            self._fence(slot, errors.get(slot.id, "did not acknowledge the update"))

    async def resume(self) -> None:
        """Open the gate and let workers that hold the allowed version go on."""
        self._gate.resume()
        self._wake()
        async with self._phase:
            await self._all([slot for slot in self._fleet if slot.serving], lambda worker: worker.resume())

    async def _update(self, slot: Slot, version: int) -> Ack:
        try:
            async with asyncio.timeout(self._config.update):
                return await slot.worker.update(version)
        except Exception as error:  # whatever went wrong is this worker's answer
            return Ack(slot.id, version, error=f"{type(error).__name__}: {error}")

    async def _all(self, slots: Sequence[Slot], call: Callable[[Worker], Awaitable[None]]) -> None:
        """Ask all; those that fail or do not answer are fenced."""

        async def ask(slot: Slot) -> None:
            try:
                async with asyncio.timeout(self._config.answer):
                    await call(slot.worker)
            except (WorkerLost, TimeoutError) as error:
                self._fence(slot, f"{type(error).__name__}: {error}")

        await asyncio.gather(*(ask(slot) for slot in slots))

    # Workers.

    def add_worker(self, worker: Worker) -> None:
        """It serves at once if it holds the allowed version; else once it has been brought to it."""
        if worker.role != "both":
            raise ValueError(f"worker {worker.id!r} has role {worker.role!r}; whole generations need 'both'")
        slot = self._fleet.add(worker)
        if self._gate.prove(slot.id, worker.version):
            self._refresh()
            self._wake()
        else:
            self._fence(slot, f"joined with version {worker.version}")

    def remove_worker(self, worker_id: str) -> None:
        """Give it nothing more, and go on elsewhere with what it has."""
        if worker_id not in self._fleet:
            raise ValueError(f"no worker {worker_id!r}; known are {[slot.id for slot in self._fleet]}")
        slot = self._fleet.remove(worker_id)
        self._gate.forget(worker_id)
        self._refresh()
        if mending := self._mending.pop(worker_id, None):
            mending.cancel()
        task = asyncio.create_task(self._reclaim(slot))
        self._moving.add(task)
        task.add_done_callback(self._moving.discard)

    def _fence(self, slot: Slot, reason: str) -> None:
        """No more traffic; its requests move, and it is probed until it proves the allowed version."""
        if self._fleet.get(slot.id) is not slot:
            return
        if slot.serving:
            _log.warning("worker %s is fenced: %s", slot.id, reason)
        self._gate.fence(slot.id, reason)
        self._refresh()
        if slot.id not in self._mending:
            self._mending[slot.id] = asyncio.create_task(self._mend(slot))

    async def _mend(self, slot: Slot) -> None:
        await self._reclaim(slot)
        delay = self._config.probe_first
        while not self._gate.serves(slot.id):
            await asyncio.sleep(delay)
            delay = min(2 * delay, self._config.probe_every)
            try:
                self._gate.prove(slot.id, await self._revive(slot))
            except Exception as error:  # any failure means: not yet
                _log.info("worker %s stays fenced: %r", slot.id, error)
        del self._mending[slot.id]
        self._refresh()
        self._wake()

    async def _revive(self, slot: Slot) -> int | None:
        async with asyncio.timeout(self._config.answer):
            version = await slot.worker.probe()
        if version != self._gate.version:
            async with asyncio.timeout(self._config.update):
                version = (await slot.worker.update(self._gate.version)).version
        async with asyncio.timeout(self._config.answer):
            await slot.worker.resume()
        return version

    # The rest.

    def stats(self) -> ProxyStats:
        return ProxyStats(
            version=self._gate.version,
            suspended=self._gate.suspended,
            requests=dict(self._ledger.counts),
            lost=self._lost,
            router=self._router.stats(),
            workers=[
                WorkerStats(s.id, s.hardware, s.worker.version, s.load, s.running, self._gate.reason(s.id))
                for s in self._fleet
            ],
        )

    async def close(self) -> None:
        """End all requests with Closed and all tasks; the workers go on."""
        self._closed = True
        entries = self._ledger.entries()
        for entry in entries:
            self._kick(entry, "close")
        await asyncio.gather(*(_left(entry) for entry in entries))
        await self._stop([*self._mending.values(), *self._moving])
        self._mending.clear()

    async def _stop(self, tasks: Iterable[asyncio.Task[None]]) -> None:
        tasks = list(tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _refresh(self) -> None:
        self._fleet.refresh(self._gate.serves)

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for woken in waiting.values():
            if not woken.done():
                woken.set_result(None)

    def _why_no_worker(self, request: GenerateRequest) -> str:
        fenced = "; ".join(f"{slot.id}: {self._gate.reason(slot.id)}" for slot in self._fleet if not slot.serving)
        return (
            f"no worker served task {request.task!r} within {self._config.patience} s: "
            f"{len(self._fleet)} known" + (f", fenced are {fenced}" if fenced else "")
        )

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


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
    if entry.left is None:
        entry.left = asyncio.get_running_loop().create_future()
    await asyncio.shield(entry.left)


def _announce(entry: Entry) -> None:
    """Tell those in `_left`."""
    if entry.left is not None:
        entry.left.set_result(None)
        entry.left = None
