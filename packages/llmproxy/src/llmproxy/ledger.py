"""Every request's fate, as plain state.

`queued -> dispatched -> (interrupted -> queued)* -> finished | aborted | failed`

Invariants (tests/llmproxy/test_llmproxy_ledger.py): a request ends exactly once; at every instant
`admitted = queued + dispatched + finished + aborted + failed`; a trajectory has at most one request in
flight; a worker's load is the sum of what its dispatched requests were charged.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from msgspec.structs import replace

from .errors import DuplicateRequest, WrongState
from .fleet import Slot
from .values import GenerateRequest, Handoff, Partial

Live = Literal["queued", "dispatched"]
End = Literal["finished", "aborted", "failed"]
Pull = Literal["", "reclaim", "interrupt", "abort", "close"]
"""Why a request is being taken away from where it is."""


class Entry:
    """One request in flight. `request` is what a worker would be sent now, partial tokens included.

    The ledger keeps the first group of fields; the proxy, which runs the request, the second.
    """

    __slots__ = (
        "cancelling",
        "charged",
        "interrupted",
        "kicked",
        "left",
        "losses",
        "placements",
        "prefill_charged",
        "prefill_slot",
        "prefill_worker",
        "prefilled_for",
        "pulled",
        "queued_for",
        "ran_for",
        "request",
        "since",
        "slot",
        "state",
        "task",
        "versions",
        "worker",
    )

    def __init__(self, request: GenerateRequest, now: float, task: asyncio.Task[Any]) -> None:
        self.request = request
        self.state: Live | End = "queued"
        self.slot: Slot | None = None
        self.charged = 0
        self.placements = 0
        self.worker = ""
        self.prefill_slot: Slot | None = None
        self.prefill_charged = 0
        self.prefill_worker = ""
        self.prefilled_for = 0.0
        self.since = now
        self.queued_for = 0.0
        self.ran_for = 0.0

        self.task = task
        self.cancelling = task.cancelling()
        self.versions: set[int] = set()
        self.losses = 0
        self.pulled: Pull = ""
        self.kicked = False
        self.interrupted = False
        self.left: asyncio.Future[None] | None = None

    @property
    def live(self) -> bool:
        return self.state in ("queued", "dispatched")

    @property
    def partial(self) -> Partial:
        return self.request.resume or Partial([], [], [], self.request.budget)


class Ledger:
    """Requests in flight, by request and by trajectory, and counts of all that ended."""

    def __init__(self) -> None:
        self._requests: dict[str, Entry] = {}
        self._trajectories: dict[str, Entry] = {}
        self.counts: dict[str, int] = dict.fromkeys(
            ("admitted", "queued", "dispatched", "interrupted", "finished", "aborted", "failed"), 0
        )

    def __len__(self) -> int:
        return len(self._requests)

    def find(self, id: str) -> Entry | None:
        """By trajectory id, or by request id."""
        return self._trajectories.get(id) or self._requests.get(id)

    def entries(self) -> list[Entry]:
        return list(self._requests.values())

    def on(self, slot: Slot) -> list[Entry]:
        return [entry for entry in self._requests.values() if slot in (entry.slot, entry.prefill_slot)]

    def admit(self, request: GenerateRequest, now: float, task: asyncio.Task[Any]) -> Entry:
        for field, id, taken in (
            ("trajectory_id", request.trajectory_id, self._trajectories),
            ("request_id", request.request_id, self._requests),
        ):
            if id in taken:
                raise DuplicateRequest(field, f"{id!r} has a request in flight", "one at a time")
        entry = Entry(request, now, task)
        self._requests[request.request_id] = entry
        self._trajectories[request.trajectory_id] = entry
        self.counts["admitted"] += 1
        self.counts["queued"] += 1
        return entry

    def dispatch(self, entry: Entry, slot: Slot, now: float, prefill: Slot | None = None) -> None:
        """To its worker; with `prefill` to that one first, while its place at the other is kept."""
        self._leave(entry, "queued")
        entry.queued_for += now - entry.since
        entry.since = now
        entry.slot = slot
        entry.placements += 1
        entry.worker = slot.id
        entry.charged = entry.request.tokens
        slot.charge(entry.charged)
        if prefill is not None:
            entry.prefill_slot = prefill
            entry.prefill_worker = prefill.id
            entry.prefill_charged = len(entry.request.context)
            prefill.charge(entry.prefill_charged)
            slot.reserved += entry.charged
        self._enter(entry, "dispatched")

    def prefilled(self, entry: Entry, handoff: Handoff, now: float) -> None:
        """The first phase is over: its cache waits at the prefill worker."""
        entry.prefilled_for += now - entry.since
        self._free_prefill(entry)
        entry.request = replace(entry.request, handoff=handoff)

    def requeue(self, entry: Entry, partial: Partial | None, now: float) -> None:
        """Interrupted: off its worker, with what is known of it, and queued to go on."""
        self._leave(entry, "dispatched")
        self._free(entry, now)
        if partial is not None or entry.request.handoff is not None:
            entry.request = replace(entry.request, resume=partial or entry.request.resume, handoff=None)
        self.counts["interrupted"] += 1
        self._enter(entry, "queued")

    def end(self, entry: Entry, state: End, now: float) -> None:
        self._leave(entry, "queued", "dispatched")
        if entry.slot is not None:
            self._free(entry, now)
        del self._requests[entry.request.request_id]
        del self._trajectories[entry.request.trajectory_id]
        self._enter(entry, state)

    def _free(self, entry: Entry, now: float) -> None:
        assert entry.slot is not None
        self._free_prefill(entry)
        entry.slot.release(entry.charged)
        entry.slot = None
        entry.charged = 0
        entry.ran_for += now - entry.since
        entry.since = now

    def _free_prefill(self, entry: Entry) -> None:
        if entry.prefill_slot is not None:
            assert entry.slot is not None
            entry.slot.reserved -= entry.charged
            entry.prefill_slot.release(entry.prefill_charged)
            entry.prefill_slot = None

    def _leave(self, entry: Entry, *allowed: Live) -> None:
        if entry.state not in allowed:
            raise WrongState(f"request {entry.request.request_id} is {entry.state}, not {' or '.join(allowed)}")
        self.counts[entry.state] -= 1

    def _enter(self, entry: Entry, state: Live | End) -> None:
        entry.state = state
        self.counts[state] += 1
