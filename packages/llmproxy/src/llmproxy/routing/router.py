"""What a routing policy is: it sees only workers that may serve, and owns no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Protocol

from llmproxy.fleet import Fleet, Slot
from llmproxy.values import GenerateRequest, GenerateResult


class Router(Protocol):
    def choose(self, request: GenerateRequest, fleet: Fleet) -> Slot | None:
        """A serving slot of `fleet`, or None when none may take the request."""
        ...

    def served(self, request: GenerateRequest, slot: Slot, result: GenerateResult | None = None) -> None:
        """A turn ended on `slot`, whose prefix cache now holds it; `result` where the tokens are known."""
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


def least_loaded(slots: Sequence[Slot], random: Random) -> Slot:
    """The best spread, at a look at each. Equal loads are equally likely."""
    loads = [slot.load for slot in slots]
    least = min(loads)
    best = [slot for slot, load in zip(slots, loads, strict=True) if load == least]
    return best[int(random.random() * len(best))]
