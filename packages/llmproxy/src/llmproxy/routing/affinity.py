"""The policy made for trajectories, in order (tests/llmproxy/test_llmproxy_routing.py):

1. the trajectory's own worker, which holds its prefix, once a turn of it ended there since the last update; a
   trajectory that comes under a new name is known by its token ids;
2. the hardware class that the task is mapped to; another class when it is full or gone, counted;
3. in the class the less loaded of two workers drawn at random, so that bursts and the members of a group spread.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from random import Random

from msgspec import Struct

from llmproxy.fleet import ANY, Fleet, Slot
from llmproxy.values import GenerateRequest, GenerateResult, Timing

from .prefix import EMPTY, Chain, PrefixIndex
from .router import less_loaded

_FORGET = 0.1
"""Weight of a turn in a worker's share of lost prefixes: about its last ten turns count."""
_CROWDED = 0.2
"""A worker where this share of turns finds less than half of the prefix it should hold has too many trajectories."""


class Home(Struct, frozen=True):
    """Where a trajectory is, how much of it is hashed, how long it was, and whether the worker lost its prefix."""

    worker: str
    chain: Chain
    tokens: int
    lost: bool


class AffinityRouter:
    """The trajectory's own worker, else hardware affinity by task, then load.

    `affinity` maps tasks to hardware classes, with `"default"` for the rest; a task without a class goes
    anywhere. `fallback` lists the classes to try, in order, when the first is gone (no serving worker) or
    full; not given, it is every other class. A class is full when the chosen worker carries over
    `saturation` tokens, or is seen to have lost the prefixes of its trajectories: their caches no longer fit.
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
        self._homes: OrderedDict[str, Home] = OrderedDict()
        self._index = PrefixIndex(remember)
        self._losing: dict[str, float] = {}
        self._fell_back: Counter[str] = Counter()
        self._stayed = self._recognized = self._lost = 0

    def choose(self, request: GenerateRequest, fleet: Fleet) -> Slot | None:
        wanted = self._wanted(request, fleet)
        own = self._home(request, fleet)
        if own is not None and self._stays(request, own, wanted, fleet):
            self._stayed += 1
            return self._count(request, wanted, own)
        full: Slot | None = None
        for hardware in self._classes(wanted, fleet):
            slots = fleet.serving(hardware, request.tokens)
            if not slots:
                continue
            slot = less_loaded(slots, self._random)
            if not self._full(slot):
                return self._count(request, wanted, slot)
            full = full or slot
        return full and self._count(request, wanted, full)

    def served(self, request: GenerateRequest, slot: Slot, result: GenerateResult | None = None) -> None:
        home = self._homes.pop(request.trajectory_id, None)
        chain = home.chain if home is not None else EMPTY
        tokens, lost = 0, False
        if result is not None:
            chain = self._index.add(request.prompt_ids, result.token_ids, slot.id, chain)
            tokens = len(request.prompt_ids) + len(result.token_ids)
            if home is not None and home.worker == slot.id and not home.lost:
                lost = self._judge(slot, min(home.tokens, len(request.prompt_ids)), result.timing)
        self._homes[request.trajectory_id] = Home(slot.id, chain, tokens, lost)
        if len(self._homes) > self._remember:
            self._homes.popitem(last=False)

    def flushed(self) -> None:
        self._homes.clear()
        self._index.clear()
        self._losing.clear()

    def stats(self) -> dict[str, int]:
        counts = {"stayed": self._stayed, "recognized": self._recognized, "lost": self._lost}
        return counts | {"homes": len(self._homes)} | {f"fallback/{path}": n for path, n in self._fell_back.items()}

    def _judge(self, slot: Slot, expected: int, timing: Timing) -> bool:
        """Whether the worker had lost the prefix; one that never told of a cached token says nothing of that."""
        if timing.cached_tokens:
            self._losing.setdefault(slot.id, 0.0)
        if timing.prefill_worker or slot.id not in self._losing:
            return False
        lost = 2 * timing.cached_tokens < expected
        self._lost += lost
        self._losing[slot.id] += _FORGET * (lost - self._losing[slot.id])
        return lost

    def _wanted(self, request: GenerateRequest, fleet: Fleet) -> str:
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
            return None if home.lost else fleet.get(home.worker)
        place = self._index.find(request.prompt_ids)
        self._recognized += place is not None
        return fleet.get(place or "")

    def _stays(self, request: GenerateRequest, own: Slot, wanted: str, fleet: Fleet) -> bool:
        if not fleet.takes(own, ANY, request.tokens):
            return False
        if wanted not in (ANY, own.hardware) and own.hardware not in self._classes(wanted, fleet):
            return False
        other = less_loaded(fleet.serving(own.hardware, request.tokens), self._random)
        return own.load <= other.load + self._slack

    def _full(self, slot: Slot) -> bool:
        if self._saturation is not None and slot.load >= self._saturation:
            return True
        return self._losing.get(slot.id, 0.0) > _CROWDED

    def _count(self, request: GenerateRequest, wanted: str, slot: Slot) -> Slot:
        if wanted not in (ANY, slot.hardware):
            task = request.task if request.task in self._affinity else "default"  # callers may name any number
            self._fell_back[f"{task}/{wanted}/{slot.hardware}"] += 1
        return slot
