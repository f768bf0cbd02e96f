"""Requests whose bytes another carries: a gateway asks here where each may go, and moves the bytes itself.

They pass the same gate, fence and router as requests of `LLMProxy.generate`, and are charged to the same workers, but
no task waits for them: a `Carrier` is called back.

Invariants (tests/llmproxy/test_llmproxy_passages.py):
- a carrier is placed only while the gate is open, on a worker that serves; between that check and the charge nothing
  is awaited;
- its charge is released once, when it leaves or its worker is fenced;
- while suspended nobody's patience runs out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from msgspec.structs import replace

from .errors import NoWorker
from .fleet import ANY, Fleet, Slot
from .gate import Gate
from .routing import Router
from .values import GenerateRequest, GenerateResult

_DRAWS = 8
"""Times that a policy is asked again when it names the worker to avoid; policies draw at random."""


class Carrier(Protocol):
    """One request on its way. `request` is what routing knows of it; it may lack token ids."""

    request: GenerateRequest
    avoid: Slot | None
    """A worker that failed it, which it does not go back to while another one takes it."""

    def placed(self, slot: Slot, version: int) -> None:
        """Carry it to this worker, which holds `version`. May be called before `enter` returns."""
        ...

    def moved(self, slot: Slot, reason: str) -> None:
        """The worker may not serve it any more; it has left and may enter again."""
        ...

    def refused(self, error: NoWorker) -> None:
        """No worker took it in time; it has left."""
        ...


class Passages:
    """Places carriers. `lost` is told of workers that a carrier found dead."""

    def __init__(
        self, gate: Gate, fleet: Fleet, router: Router, patience: float, lost: Callable[[Slot, str], None]
    ) -> None:
        self._gate = gate
        self._fleet = fleet
        self._router = router
        self._patience = patience
        self._lost = lost
        self._carried: dict[Carrier, tuple[Slot, int]] = {}
        self._waiting: dict[Carrier, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._carried) + len(self._waiting)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def enter(self, carrier: Carrier) -> None:
        """Place it now, or when the gate and a worker allow."""
        if self._gate.suspended or not self._place(carrier):
            self._wait(carrier)

    def leave(self, carrier: Carrier, *, served: bool, result: GenerateResult | None = None) -> None:
        """It ended, or gave up waiting. `served`: its worker's cache holds it now, and `result`, where given."""
        self._waiting.pop(carrier, None)
        place = self._carried.pop(carrier, None)
        if place is not None:
            slot, tokens = place
            slot.release(tokens)
            if served:
                slot.strikes = 0
                self._router.served(carrier.request, slot, result)

    def fail(self, carrier: Carrier, reason: str) -> None:
        """Its worker died under it: it leaves, and the worker is fenced."""
        slot, tokens = self._carried.pop(carrier)
        slot.release(tokens)
        self._lost(slot, reason)

    def reclaim(self, slot: Slot, reason: str) -> None:
        """Take away what a worker carries."""
        for carrier in [carrier for carrier, (at, _) in self._carried.items() if at is slot]:
            self.leave(carrier, served=False)
            carrier.moved(slot, reason)

    def renew(self) -> None:
        """The gate was shut: the patience of those who wait begins anew."""
        self._waiting = dict.fromkeys(self._waiting, asyncio.get_running_loop().time() + self._patience)

    def wake(self) -> None:
        """The gate or the fleet changed: place whoever waits, first come first served."""
        for carrier in list(self._waiting):
            deadline = self._waiting.pop(carrier, None)  # None: it left while others were placed
            if deadline is not None and (self._gate.suspended or not self._place(carrier)):
                self._waiting[carrier] = deadline

    def _place(self, carrier: Carrier) -> bool:
        slot = self._router.choose(carrier.request, self._fleet)
        for _ in range(_DRAWS):
            if slot is None or slot is not carrier.avoid:
                break
            slot = self._router.choose(replace(carrier.request, trajectory_id="", prompt_ids=[]), self._fleet)
        if slot is None:
            return False
        if (
            slot is carrier.avoid
        ):  # a policy may insist, as where it is the only one of its class, or the least loaded
            others = (other for other in self._fleet.serving(ANY, carrier.request.tokens) if other is not slot)
            slot = min(others, key=lambda other: other.load, default=slot)
        tokens = carrier.request.tokens
        slot.charge(tokens)
        self._carried[carrier] = (slot, tokens)
        carrier.placed(slot, self._gate.version)
        return True

    def _wait(self, carrier: Carrier) -> None:
        loop = asyncio.get_running_loop()
        self._waiting[carrier] = loop.time() + self._patience
        if self._timer is None:
            self._timer = loop.call_later(self._patience, self._expire)

    def _expire(self) -> None:
        """Refuse those whose patience ended; look again when that of the next one does."""
        self._timer = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self._gate.suspended:
            self.renew()
        fenced = self._gate.fenced(slot.id for slot in self._fleet)
        for carrier in [carrier for carrier, deadline in self._waiting.items() if deadline <= now]:
            del self._waiting[carrier]
            task, known = carrier.request.task, f"{len(self._fleet)} known{fenced}"
            carrier.refused(NoWorker(f"no worker took task {task!r} within {self._patience} s: {known}"))
        if self._waiting:
            self._timer = loop.call_at(min(self._waiting.values()), self._expire)
