"""Which worker takes a request.

A policy is a small object with `choose`, `served` and `stats`; it sees only workers that may serve, and owns
no I/O. `AffinityRouter`, in order (tests/llmproxy/test_llmproxy_routing.py):

1. the hardware class that the task is mapped to; another class when it is saturated or gone, counted;
2. the trajectory's own worker, which holds its prefix, once a turn of it ended there since the last update;
3. else the less loaded of two workers drawn at random, so that bursts and the members of a group spread.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Protocol

from .fleet import ANY, Fleet, Slot
from .values import GenerateRequest


class Router(Protocol):
    def choose(self, request: GenerateRequest, fleet: Fleet) -> Slot | None:
        """A serving slot of `fleet`, or None when none may take the request."""
        ...

    def served(self, request: GenerateRequest, slot: Slot) -> None:
        """A turn ended on `slot`, whose prefix cache now holds it."""
        ...

    def flushed(self) -> None:
        """All prefix caches are gone: the version changed."""
        ...

    def stats(self) -> dict[str, int]: ...


def less_loaded(slots: Sequence[Slot], random: Random) -> Slot:
    """Power of two choices: near the best spread at two looks. Equal loads are equally likely."""
    first = slots[int(random.random() * len(slots))]
    second = slots[int(random.random() * len(slots))]
    return second if second.load < first.load else first


class AffinityRouter:
    """Hardware affinity by task, then the trajectory's own worker, then load.

    `affinity` maps tasks to hardware classes, with `"default"` for the rest; a task without a class goes
    anywhere. `fallback` lists the classes to try, in order, when the first is gone (no serving worker) or
    saturated (the chosen worker carries over `saturation` tokens); not given, it is every other class.
    A trajectory leaves its worker when that carries `slack` tokens more than the alternative: by then
    waiting there costs more than rebuilding the prefix elsewhere.
    """

    def __init__(
        self,
        affinity: Mapping[str, str] | None = None,
        *,
        fallback: Mapping[str, Sequence[str]] | None = None,
        saturation: int | None = None,
        slack: int = 65_536,
        remember: int = 65_536,
        random: Random | None = None,
    ) -> None:
        self._affinity = dict(affinity or {})
        self._fallback = fallback
        self._saturation = saturation
        self._slack = slack
        self._remember = remember
        self._random = random or Random()
        self._homes: OrderedDict[str, str] = OrderedDict()
        self._fell_back: Counter[str] = Counter()
        self._stayed = 0

    def choose(self, request: GenerateRequest, fleet: Fleet) -> Slot | None:
        wanted = self._affinity.get(request.task) or self._affinity.get("default") or ANY
        full: Slot | None = None
        for hardware in self._classes(wanted, fleet):
            slot = self._pick(request, hardware, fleet)
            if slot is None:
                continue
            if self._saturation is None or slot.load < self._saturation:
                return self._count(request, wanted, slot)
            full = full or slot
        return full and self._count(request, wanted, full)

    def served(self, request: GenerateRequest, slot: Slot) -> None:
        self._homes[request.trajectory_id] = slot.id
        self._homes.move_to_end(request.trajectory_id)
        if len(self._homes) > self._remember:
            self._homes.popitem(last=False)

    def flushed(self) -> None:
        self._homes.clear()

    def stats(self) -> dict[str, int]:
        return {"stayed": self._stayed, "homes": len(self._homes)} | {
            f"fallback/{path}": count for path, count in self._fell_back.items()
        }

    def _classes(self, wanted: str, fleet: Fleet) -> Iterable[str]:
        yield wanted
        if self._fallback is not None:
            yield from self._fallback.get(wanted, ())
        elif wanted != ANY:
            yield from (name for name in fleet.classes if name != wanted)

    def _pick(self, request: GenerateRequest, hardware: str, fleet: Fleet) -> Slot | None:
        slots = fleet.serving(hardware, request.tokens)
        if not slots:
            return None
        other = less_loaded(slots, self._random)
        own = fleet.get(self._homes.get(request.trajectory_id, ""))
        if own is None or own.load > other.load + self._slack or not fleet.takes(own, hardware, request.tokens):
            return other
        return own

    def _count(self, request: GenerateRequest, wanted: str, slot: Slot) -> Slot:
        if wanted not in (ANY, slot.hardware):
            self._fell_back[f"{request.task}/{wanted}/{slot.hardware}"] += 1
        self._stayed += self._homes.get(request.trajectory_id) == slot.id
        return slot
