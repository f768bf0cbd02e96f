"""The policy made for trajectories, in order (tests/llmproxy/test_llmproxy_routing.py):

1. the hardware class that the task is mapped to; another class when it is saturated or gone, counted;
2. the trajectory's own worker, which holds its prefix, once a turn of it ended there since the last update; a
   trajectory that comes under a new name is known by its token ids;
3. else the less loaded of two workers drawn at random, so that bursts and the members of a group spread.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from random import Random

from llmproxy.fleet import ANY, Fleet, Slot
from llmproxy.values import GenerateRequest, GenerateResult

from .prefix import EMPTY, Chain, PrefixIndex
from .router import less_loaded


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
        slack: int = 200_000,
        remember: int = 65_536,
        random: Random | None = None,
    ) -> None:
        self._affinity = dict(affinity or {})
        self._fallback = fallback
        self._saturation = saturation
        self._slack = slack
        self._remember = remember
        self._random = random or Random()
        self._homes: OrderedDict[str, tuple[str, Chain]] = OrderedDict()
        self._index = PrefixIndex(remember)
        self._fell_back: Counter[str] = Counter()
        self._stayed = self._recognized = 0

    def choose(self, request: GenerateRequest, fleet: Fleet) -> Slot | None:
        own = self._home(request, fleet)
        wanted = self._wanted(request, own, fleet)
        full: Slot | None = None
        for hardware in self._classes(wanted, fleet):
            slot = self._pick(request, own, hardware, fleet)
            if slot is None:
                continue
            if self._saturation is None or slot.load < self._saturation:
                return self._count(request, wanted, own, slot)
            full = full or slot
        return full and self._count(request, wanted, own, full)

    def served(self, request: GenerateRequest, slot: Slot, result: GenerateResult | None = None) -> None:
        chain = self._homes.pop(request.trajectory_id, ("", EMPTY))[1]
        if result is not None:
            chain = self._index.add(request.prompt_ids, result.token_ids, slot.id, chain)
        self._homes[request.trajectory_id] = (slot.id, chain)
        if len(self._homes) > self._remember:
            self._homes.popitem(last=False)

    def flushed(self) -> None:
        self._homes.clear()
        self._index.clear()

    def stats(self) -> dict[str, int]:
        counts = {"stayed": self._stayed, "recognized": self._recognized, "homes": len(self._homes)}
        return counts | {f"fallback/{path}": count for path, count in self._fell_back.items()}

    def _wanted(self, request: GenerateRequest, own: Slot | None, fleet: Fleet) -> str:
        return self._affinity.get(request.task) or self._affinity.get("default") or ANY

    def _classes(self, wanted: str, fleet: Fleet) -> Iterable[str]:
        yield wanted
        if self._fallback is not None:
            yield from self._fallback.get(wanted, ())
        elif wanted != ANY:
            yield from (name for name in fleet.classes if name != wanted)

    def _home(self, request: GenerateRequest, fleet: Fleet) -> Slot | None:
        """The worker that holds the trajectory's prefix."""
        home = self._homes.get(request.trajectory_id)
        if home is not None:
            return fleet.get(home[0])
        place = self._index.find(request.prompt_ids)
        self._recognized += place is not None
        return fleet.get(place or "")

    def _pick(self, request: GenerateRequest, own: Slot | None, hardware: str, fleet: Fleet) -> Slot | None:
        slots = fleet.serving(hardware, request.tokens)
        if not slots:
            return None
        other = less_loaded(slots, self._random)
        if own is None or own.load > other.load + self._slack or not fleet.takes(own, hardware, request.tokens):
            return other
        return own

    def _count(self, request: GenerateRequest, wanted: str, own: Slot | None, slot: Slot) -> Slot:
        if wanted not in (ANY, slot.hardware):
            self._fell_back[f"{request.task}/{wanted}/{slot.hardware}"] += 1
        self._stayed += own is slot
        return slot
