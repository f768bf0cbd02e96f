"""Policies that know neither hardware nor versions: what most balancers offer, for comparison and simple fleets."""

from __future__ import annotations

from collections import OrderedDict
from itertools import count
from random import Random

from llmproxy.fleet import ANY, Fleet, Slot
from llmproxy.values import GenerateRequest, GenerateResult

from .router import least_loaded, less_loaded


class RoundRobinRouter:
    """One worker after the other."""

    def __init__(self) -> None:
        self._turn = count()

    def choose(self, request: GenerateRequest, fleet: Fleet) -> Slot | None:
        slots = fleet.serving(ANY, request.tokens)
        return slots[next(self._turn) % len(slots)] if slots else None

    def served(self, request: GenerateRequest, slot: Slot, result: GenerateResult | None = None) -> None:
        pass

    def flushed(self) -> None:
        pass

    def stats(self) -> dict[str, int]:
        return {}


class PowerOfTwoRouter(RoundRobinRouter):
    """The less loaded of two drawn at random, every turn anew."""

    def __init__(self, random: Random | None = None) -> None:
        self._random = random or Random()

    def choose(self, request: GenerateRequest, fleet: Fleet) -> Slot | None:
        slots = fleet.serving(ANY, request.tokens)
        return less_loaded(slots, self._random) if slots else None


class StickyRouter(RoundRobinRouter):
    """First turns to the least loaded worker, later ones always where the first went."""

    def __init__(self, random: Random | None = None, remember: int = 65_536) -> None:
        self._random = random or Random()
        self._remember = remember
        self._homes: OrderedDict[str, str] = OrderedDict()

    def choose(self, request: GenerateRequest, fleet: Fleet) -> Slot | None:
        home = fleet.get(self._homes.get(request.trajectory_id, ""))
        if home is not None and fleet.takes(home, ANY, request.tokens):
            return home
        slots = fleet.serving(ANY, request.tokens)
        if not slots:
            return None
        slot = least_loaded(slots, self._random)
        self._homes[request.trajectory_id] = slot.id
        if len(self._homes) > self._remember:
            self._homes.popitem(last=False)
        return slot

    def stats(self) -> dict[str, int]:
        return {"homes": len(self._homes)}
