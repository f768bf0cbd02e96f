"""Cache-aware routing as public routers do it: the longest known prefix wins while the fleet is balanced."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from random import Random

from llmproxy.fleet import ANY, Fleet, Slot
from llmproxy.values import GenerateRequest, GenerateResult

from .prefix import BLOCK


class CacheAwareRouter:
    """Guesses each worker's prefix cache from what it was sent.

    When the most loaded worker has over `absolute` requests and over `relative` times as many more than the least
    loaded one, a request goes to the worker with the fewest. Else it goes where more than `threshold` of it is
    believed cached, or to the worker believed to cache least.
    """

    def __init__(
        self,
        threshold: float = 0.5,
        absolute: int = 32,
        relative: float = 1.1,
        remember: int = 1_000_000,
        random: Random | None = None,
    ) -> None:
        self._threshold = threshold
        self._absolute = absolute
        self._relative = relative
        self._remember = remember
        self._random = random or Random()
        self._blocks: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._sizes: Counter[str] = Counter()
        self._hits = 0

    def choose(self, request: GenerateRequest, fleet: Fleet) -> Slot | None:
        slots = fleet.serving(ANY, request.tokens)
        if not slots:
            return None
        hashes = _hashes(request.context)
        slot = self._pick(hashes, slots)
        self._store(slot.id, hashes)
        return slot

    def served(self, request: GenerateRequest, slot: Slot, result: GenerateResult | None = None) -> None:
        pass

    def flushed(self) -> None:
        self._blocks.clear()
        self._sizes.clear()

    def stats(self) -> dict[str, int]:
        return {"blocks": len(self._blocks), "hits": self._hits}

    def _pick(self, hashes: list[int], slots: Sequence[Slot]) -> Slot:
        running = [slot.running for slot in slots]
        if max(running) - min(running) > self._absolute and max(running) > self._relative * min(running):
            return min(slots, key=lambda slot: (slot.running, self._random.random()))
        best = max(slots, key=lambda slot: self._matched(slot.id, hashes))
        if hashes and self._matched(best.id, hashes) > self._threshold * len(hashes):
            self._hits += 1
            return best
        return min(slots, key=lambda slot: (self._sizes[slot.id], self._random.random()))

    def _matched(self, worker: str, hashes: list[int]) -> int:
        """Blocks from the start that the worker was sent: a bisection, as whoever has a block has those before it."""
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if (worker, hashes[middle - 1]) in self._blocks else (low, middle - 1)
        return low

    def _store(self, worker: str, hashes: list[int]) -> None:
        for value in hashes:
            key = (worker, value)
            if key not in self._blocks:
                self._sizes[worker] += 1
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._remember:
            (gone, _), _ = self._blocks.popitem(last=False)
            self._sizes[gone] -= 1


def _hashes(ids: list[int]) -> list[int]:
    hashes: list[int] = []
    value = 0
    for start in range(0, len(ids) - BLOCK + 1, BLOCK):
        value = hash((value, tuple(ids[start : start + BLOCK])))
        hashes.append(value)
    return hashes
