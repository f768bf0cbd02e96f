"""The workers that a proxy knows, with their load, grouped by hardware class.

Load is counted in tokens. A worker that reports its backlog says itself what it has to do; another is charged the
longest context of each request when that is dispatched, and released when it leaves; releasing more than was
charged raises (tests/llmproxy/test_llmproxy_proxy.py: the counters return to zero).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from .errors import WrongState
from .worker import Reports, Role, Worker

ANY = ""
"""Stands for all hardware classes together."""


class Slot:
    """A worker and what it is carrying."""

    __slots__ = (
        "_backlog",
        "charged",
        "context_limit",
        "hardware",
        "id",
        "reserved",
        "role",
        "running",
        "serving",
        "strikes",
        "worker",
    )

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.id = worker.id
        self.hardware = worker.hardware
        self.role: Role = worker.role
        self.context_limit = worker.context_limit
        self.serving = False
        self.charged = 0
        self.reserved = 0  # of `charged`, for requests that are still prefilled elsewhere
        self.running = 0
        self.strikes = 0  # how often it was fenced since it last finished a request
        self._backlog = worker.backlog if isinstance(worker, Reports) else None

    @property
    def load(self) -> int:
        """Tokens."""
        return self.charged if self._backlog is None else self._backlog() + self.reserved

    def charge(self, tokens: int) -> None:
        self.charged += tokens
        self.running += 1

    def release(self, tokens: int) -> None:
        if self.running == 0 or self.charged < tokens:
            raise WrongState(
                f"worker {self.id}: released {tokens} tokens, held {self.charged} in {self.running} requests"
            )
        self.charged -= tokens
        self.running -= 1


class Fleet:
    """Slots by id, and for each hardware class those that may serve now."""

    def __init__(self) -> None:
        self._slots: dict[str, Slot] = {}
        self._serving: dict[str, list[Slot]] = {}
        self._shortest: dict[str, int] = {}
        self.context_limit = 0
        """The longest context that any worker takes, serving or not; 0 without workers."""

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots.values())

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, worker_id: object) -> bool:
        return worker_id in self._slots

    def get(self, worker_id: str) -> Slot | None:
        return self._slots.get(worker_id)

    def add(self, worker: Worker) -> Slot:
        if worker.id in self._slots:
            raise ValueError(f"worker id {worker.id!r} is taken; remove that worker first")
        slot = self._slots[worker.id] = Slot(worker)
        return slot

    def remove(self, worker_id: str) -> Slot:
        slot = self._slots.pop(worker_id)
        slot.serving = False
        return slot

    def refresh(self, serves: Callable[[str], bool]) -> None:
        """Regroup after workers came, went, or were fenced, so that a request need not scan the fleet."""
        self._serving = {}
        self.context_limit = max((slot.context_limit for slot in self._slots.values()), default=0)
        for slot in self._slots.values():
            slot.serving = serves(slot.id)
            if slot.serving:
                self._serving.setdefault(ANY, []).append(slot)
                self._serving.setdefault(slot.hardware, []).append(slot)
        self._shortest = {name: min(s.context_limit for s in slots) for name, slots in self._serving.items()}

    @property
    def classes(self) -> list[str]:
        """Hardware classes with a serving worker."""
        return [name for name in self._serving if name != ANY]

    def serving(self, hardware: str, tokens: int) -> Sequence[Slot]:
        """Slots of a class that take a context of so many tokens."""
        slots = self._serving.get(hardware, ())
        if tokens <= self._shortest.get(hardware, 0):
            return slots
        return [slot for slot in slots if tokens <= slot.context_limit]

    def takes(self, slot: Slot, hardware: str, tokens: int) -> bool:
        """Whether `slot` is one of `serving(hardware, tokens)`."""
        return slot.serving and hardware in (ANY, slot.hardware) and tokens <= slot.context_limit
