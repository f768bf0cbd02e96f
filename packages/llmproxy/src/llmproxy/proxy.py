"""The proxy: requests go through a gate to workers; weights change while it is shut; failed workers are mended.

Invariants, driven together by tests/llmproxy/test_llmproxy_machine.py:
- every admitted request ends exactly once: a result, or one typed error;
- tokens come only from workers that proved the allowed version, and spans say which made what;
- a worker that failed gets no traffic until it proved the allowed version again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager

from .checks import check_request
from .config import ProxyConfig, ProxyStats, WorkerStats
from .errors import Closed, UpdateFailed, WorkerLost, WrongState
from .fleet import Fleet, Slot
from .flights import Flights
from .gate import Gate
from .passages import Passages
from .prefills import Prefills
from .routing import AffinityRouter, Router
from .values import Ack, GenerateRequest, GenerateResult, Partial
from .watch import Watch
from .worker import Worker

_log = logging.getLogger(__name__)


class LLMProxy:
    """A trajectory-level gateway over workers, embeddable in any asyncio program.

    The proxy does not own its workers: `close` ends its requests and tasks and leaves them running.
    """

    def __init__(
        self,
        workers: Iterable[Worker] = (),
        *,
        router: Router | None = None,
        prefill_router: Router | None = None,
        config: ProxyConfig = ProxyConfig(),  # noqa: B008 - immutable
        version: int | None = None,
    ) -> None:
        workers = list(workers)
        held = [worker.version for worker in workers if worker.version is not None]
        self._config = config
        self._router = router or AffinityRouter()
        self._prefill_router = prefill_router or AffinityRouter()
        self._gate = Gate(max(held, default=0) if version is None else version)
        self._fleet = Fleet()
        self._prefill_fleet = Fleet()
        self._prefills = Prefills(self._prefill_fleet, self._prefill_router, config)
        self._flights = Flights(self._gate, self._fleet, self._router, self._prefills, config, self._fence)
        self._watch = Watch(config.watch, self._slots, self._check)
        self.passages = Passages(self._gate, self._fleet, self._router, config.patience, self._fence)
        self._mending: dict[str, asyncio.Task[None]] = {}
        self._moving: set[asyncio.Task[None]] = set()
        self._phase = asyncio.Lock()
        self._closed = False
        for worker in workers:
            self.add_worker(worker)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Run one generation to its end, wherever and under however many versions that takes.

        Cancelling the call aborts the generation in its engine.
        """
        if self._closed:
            raise Closed("the proxy is closed")
        check_request(request, self._fleet.context_limit or request.tokens)
        if not self._gate.suspended:  # a worker that loads weights may be silent
            self._watch.arm()
        return await self._flights.run(request)

    async def abort(self, id: str) -> bool:
        """End the request of a trajectory (or of a request id) for good; False when none is in flight."""
        return await self._flights.abort(id)

    async def interrupt(self, id: str) -> Partial | None:
        """Stop the generation of a trajectory (or request id) and keep what it made, to resume from.

        Its `generate` raises Interrupted. None when none is in flight, or when it ended first.
        """
        return await self._flights.interrupt(id)

    # Weights.

    async def suspend(self) -> None:
        """From the call on nothing new is placed; when it returns, no worker generates."""
        self._gate.suspend()
        async with self._phase:
            self._gate.suspend()  # again: a resume that waited for an update has opened it
            mending, self._mending = self._mending, {}
            await self._stop(mending.values())
            await self._watch.stop()
            await self._all(lambda worker: worker.pause())

    async def prefetch(self, version: int) -> list[Ack]:
        """Have every worker stage `version` while it generates; the acknowledgements tell who could not."""

        async def stage(slot: Slot) -> Ack:
            try:
                async with _within(self._config.update):
                    await slot.worker.prefetch(version)
            except Exception as error:  # whatever went wrong is this worker's answer
                return Ack(slot.id, version, error=f"{type(error).__name__}: {error}")
            return Ack(slot.id, version)

        return await asyncio.gather(*(stage(slot) for slot in self._slots()))

    async def update(self, version: int) -> list[Ack]:
        """Load `version` on every worker, fenced ones too, and make it the only one that may serve.

        A worker that fails is fenced (`on_failure="fence"`), its acknowledgement saying why; with `"fail"`, or
        when none succeeds, raises UpdateFailed and the proxy stays suspended until an update succeeds; so it does
        when the call is cancelled.
        """
        async with self._phase:
            if not self._gate.suspended:
                raise WrongState("update needs a suspended proxy; call suspend first")
            self._gate.refuse()  # until all have answered, nobody knows who holds what
            slots = list(self._slots())
            acks = await asyncio.gather(*(self._update(slot, version) for slot in slots))
        gone = {slot.id for slot in slots if self._find(slot.id) is not slot}  # another may have come under its name
        self.accept(version, [ack for ack in acks if ack.worker not in gone])
        return acks

    def accept(self, version: int, acks: Sequence[Ack]) -> None:
        """Take over the acknowledgements of an update that another proxy over the same workers made."""
        slots = {slot.id: slot for slot in self._slots()}
        known = [ack for ack in acks if ack.worker in slots]
        held = {ack.worker for ack in known if ack.version == version and not ack.error}
        failed = [_failure(ack, version) for ack in known if ack.worker not in held]
        if failed and (self._config.on_failure == "fail" or not held):
            self._gate.refuse()
            raise UpdateFailed(version, failed)
        errors = {ack.worker: ack.error for ack in failed}
        self._gate.allow(version)
        self._flights.allow(version)
        self._router.flushed()
        self._prefills.flushed()
        for slot in slots.values():
            if slot.id in held:
                self._gate.prove(slot.id, version)
            else:
                self._fence(slot, errors.get(slot.id, "was not part of the update"))
        self._refresh()

    async def resume(self) -> None:
        """Open the gate, once an update that is under way has ended, and let workers that hold its version go on."""
        async with self._phase:
            self._gate.resume()
            self.passages.renew()
            self._watch.arm()
            self._wake()
            for slot in self._slots():
                if not slot.serving:
                    self._start_mending(slot)
            await self._all(lambda worker: worker.resume())

    async def _update(self, slot: Slot, version: int) -> Ack:
        try:
            if not slot.serving:  # it was not paused with the others; one that is silent is not waited for long
                async with _within(self._config.answer):
                    await slot.worker.pause()
            async with _within(self._config.update):
                return await slot.worker.update(version)
        except Exception as error:  # whatever went wrong is this worker's answer
            lost = isinstance(error, WorkerLost) or type(error) is TimeoutError  # not one that the worker raised
            return Ack(slot.id, version, error=f"{type(error).__name__}: {error}", lost=lost)

    async def _all(self, call: Callable[[Worker], Awaitable[None]]) -> None:
        """Ask all that serve; those that fail or do not answer are fenced."""

        async def ask(slot: Slot) -> None:
            try:
                async with _within(self._config.answer):
                    await call(slot.worker)
            except Exception as error:  # whatever went wrong, this worker is not where it should be
                self._fence(slot, f"{type(error).__name__}: {error}")

        await asyncio.gather(*(ask(slot) for slot in self._slots() if slot.serving))

    # Workers, and what faces that carry bytes themselves need to know (see `passages`).

    @property
    def version(self) -> int:
        """The version that is served."""
        return self._gate.version

    @property
    def context_limit(self) -> int:
        """The longest context that any worker takes; 0 without workers."""
        return self._fleet.context_limit

    def workers(self) -> list[Slot]:
        return list(self._fleet)

    def in_flight(self, id: str) -> bool:
        """Whether `generate` runs for this trajectory or request."""
        return self._flights.ledger.find(id) is not None

    def lose(self, slot: Slot, reason: str) -> None:
        """A worker was found dead or unfit: no traffic until it proved the allowed version again."""
        self._fence(slot, reason)

    def add_worker(self, worker: Worker) -> None:
        """It serves at once if it holds the allowed version; else once it has been brought to it."""
        fleet, other = self._fleet, self._prefill_fleet
        if worker.role == "prefill":
            fleet, other = other, fleet
        needed = {"prefill": "prefill", "decode": "release", "both": "generate"}[worker.role]
        if not hasattr(worker, needed):
            raise ValueError(f"worker {worker.id!r} has role {worker.role!r}, which needs a method {needed!r}")
        if worker.id in other:
            raise ValueError(f"worker id {worker.id!r} is taken; remove that worker first")
        slot = fleet.add(worker)
        if self._gate.prove(slot.id, worker.version):
            self._refresh()
            self._wake()
        else:
            self._fence(slot, f"joined with version {worker.version}")

    def remove_worker(self, worker_id: str) -> None:
        """Give it nothing more, and go on elsewhere with what it has.

        Passages end there, unless the proxy is suspended: nobody would have the worker go on.
        """
        slot = self._find(worker_id)
        if slot is None:
            raise ValueError(f"no worker {worker_id!r}; known are {[slot.id for slot in self._slots()]}")
        (self._prefill_fleet if slot.role == "prefill" else self._fleet).remove(worker_id)
        self._gate.forget(worker_id)
        self._refresh()
        if self._gate.suspended:
            self.passages.reclaim(slot, "was removed while it was paused")
        if mending := self._mending.pop(worker_id, None):
            mending.cancel()
        task = asyncio.create_task(self._flights.reclaim(slot))
        self._moving.add(task)
        task.add_done_callback(self._moving.discard)

    def _fence(self, slot: Slot, reason: str, *, silent: bool = False) -> None:
        """No more traffic until it proved the allowed version, which it is probed for unless suspended."""
        if self._find(slot.id) is not slot:
            return
        if slot.serving:
            slot.strikes += 1
            _log.warning("worker %s is fenced: %s", slot.id, reason)
        self._gate.fence(slot.id, reason)
        self._refresh()
        self.passages.reclaim(slot, reason)
        if not self._gate.suspended:
            self._start_mending(slot, silent=silent)

    async def _check(self, slot: Slot) -> None:
        """It has requests out: does it answer, and does it still hold what it proved?"""
        try:
            async with asyncio.timeout(self._config.answer):
                version = await slot.worker.probe()
        except TimeoutError:
            self._fence(slot, f"did not answer for {self._config.answer} s", silent=True)
        except Exception as error:  # whatever went wrong, it may not serve
            self._fence(slot, f"{type(error).__name__}: {error}")
        else:  # while suspended it may be loading a version, and then holds none
            if slot.serving and not self._gate.suspended and version != self._gate.version:
                self._fence(slot, f"holds version {version}, allowed is {self._gate.version}")

    def _start_mending(self, slot: Slot, *, silent: bool = False) -> None:
        if slot.id not in self._mending and not self._closed:
            self._mending[slot.id] = asyncio.create_task(self._mend(slot, silent))

    async def _mend(self, slot: Slot, silent: bool) -> None:
        """Move the requests of a fenced worker, then bring it to the allowed version, however often that takes."""
        await self._flights.reclaim(slot, silent=silent)
        delay = min(self._config.probe_first * 2 ** max(0, slot.strikes - 1), self._config.probe_every)
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
        async with _within(self._config.answer):
            version = await slot.worker.probe()
        if version is None or version < self._gate.version:
            async with _within(self._config.update):
                version = (await slot.worker.update(self._gate.version)).version
        async with _within(self._config.answer):
            await slot.worker.resume()
        return version

    # The rest.

    def stats(self) -> ProxyStats:
        return ProxyStats(
            version=self._gate.version,
            suspended=self._gate.suspended,
            requests=dict(self._flights.ledger.counts),
            lost=self._flights.lost,
            router=self._router.stats(),
            prefill_router=self._prefill_router.stats(),
            unsplit=self._prefills.unsplit,
            local=self._prefills.local,
            workers=[
                WorkerStats(
                    s.id, s.hardware, s.worker.version, s.load, s.running, self._gate.reason(s.id), s.role, s.charged
                )
                for s in self._slots()
            ],
        )

    async def close(self) -> None:
        """End all requests with Closed and all tasks; the workers go on."""
        self._closed = True
        await self._flights.end()
        await self._watch.stop()
        await self._stop([*self._mending.values(), *self._moving])
        self._mending.clear()

    async def _stop(self, tasks: Iterable[asyncio.Task[None]]) -> None:
        tasks = list(tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _slots(self) -> Iterator[Slot]:
        yield from self._fleet
        yield from self._prefill_fleet

    def _find(self, worker_id: str) -> Slot | None:
        return self._fleet.get(worker_id) or self._prefill_fleet.get(worker_id)

    def _refresh(self) -> None:
        self._fleet.refresh(self._gate.serves)
        self._prefill_fleet.refresh(self._gate.serves)

    def _wake(self) -> None:
        if len(self._flights.ledger) and not self._gate.suspended:
            self._watch.arm()  # those that waited go out now
        self._flights.wake()
        self.passages.wake()


@asynccontextmanager
async def _within(seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise TimeoutError(f"no answer in {seconds:g} s") from None


def _failure(ack: Ack, version: int) -> Ack:
    return Ack(ack.worker, version, error=ack.error or f"it holds {ack.version}", lost=ack.lost)
