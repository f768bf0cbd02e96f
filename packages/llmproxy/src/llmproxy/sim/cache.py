"""Keys and values that an engine keeps of contexts nobody computes on: whole contexts by trajectory, first prompts by
content.

Sequences come first: what is kept gives way to them token by token, the least recently used context losing its end
first, as engines that cache by blocks do. Invariant: after `trim(room)` no more than `room` tokens are kept
(tests/llmproxy/test_llmproxy_cache.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from math import ceil


class Cache:
    """At most `limit` tokens; a limit of 0 keeps nothing."""

    def __init__(self, limit: float) -> None:
        self.tokens = 0
        self._limit = limit
        self._kept: OrderedDict[Hashable, int] = OrderedDict()

    def __getitem__(self, key: Hashable) -> int:
        """How many tokens of this context are known."""
        return self._kept.get(key, 0)

    def take(self, key: Hashable) -> int:
        """Its tokens are a sequence's from now on."""
        tokens = self._kept.pop(key, 0)
        self.tokens -= tokens
        return tokens

    def keep(self, key: Hashable, tokens: int) -> None:
        self.take(key)
        self._kept[key] = tokens
        self.tokens += tokens

    def trim(self, room: float) -> None:
        """Sequences leave so much."""
        if self.tokens <= room and self.tokens <= self._limit:
            return
        over = ceil(self.tokens - max(0.0, min(self._limit, room)))
        while over > 0:
            key, tokens = next(iter(self._kept.items()))
            lost = min(over, tokens)
            over -= lost
            self.tokens -= lost
            if lost == tokens:
                del self._kept[key]
            else:
                self._kept[key] = tokens - lost

    def clear(self) -> None:
        self._kept.clear()
        self.tokens = 0
