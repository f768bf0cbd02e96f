"""Where generations ended, by the token ids of their whole contexts: finds who continues what without being told.

A stored sequence holds a prompt and what was generated from it, so only its continuation matches: members of a group,
which share the prompt alone, do not. Token ids are hashed in blocks, each block with all before it; what follows
the last whole block of a stored sequence is kept as it is, so a match is exact to the token. Memory is one entry a
stored sequence, bounded by forgetting the least recently used (tests/llmproxy/test_llmproxy_prefix.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from msgspec import Struct

BLOCK = 64


class Chain(Struct, frozen=True):
    """The whole blocks of a sequence, as far as hashed: how many, their hash, and the last of them."""

    blocks: int
    hash: int
    last: tuple[int, ...]


EMPTY = Chain(0, 0, ())


class PrefixIndex:
    """Places by sequence. `remember` bounds how many sequences are kept."""

    def __init__(self, remember: int) -> None:
        self._remember = remember
        self._ends: OrderedDict[tuple[int, tuple[int, ...]], str] = OrderedDict()
        self._tails: dict[int, dict[int, int]] = {}  # for each hash: how many sequences end so many tokens after it

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, prompt: Sequence[int], made: Sequence[int], place: str, known: Chain = EMPTY) -> Chain:
        """Remember `prompt + made`. With the chain of an earlier part of it, only what is new is hashed."""
        start = known.blocks * BLOCK
        if known.blocks and tuple(prompt[start - BLOCK : start]) != known.last:
            known, start = EMPTY, 0
        rest = [*prompt[start:], *made]
        chain = _extend(known, rest)
        tail = tuple(rest[(chain.blocks - known.blocks) * BLOCK :])
        key = (chain.hash, tail)
        if self._ends.pop(key, None) is None:
            lengths = self._tails.setdefault(chain.hash, {})
            lengths[len(tail)] = lengths.get(len(tail), 0) + 1
        self._ends[key] = place
        if len(self._ends) > self._remember:
            self._forget_oldest()
        return chain

    def find(self, ids: Sequence[int]) -> str | None:
        """The place of the longest remembered sequence that `ids` begins with."""
        if not self._ends:
            return None
        chains = [EMPTY.hash]
        for start in range(0, len(ids) - BLOCK + 1, BLOCK):
            chains.append(hash((chains[-1], tuple(ids[start : start + BLOCK]))))
        for blocks in reversed(range(len(chains))):
            start = blocks * BLOCK
            for length in sorted(self._tails.get(chains[blocks], ()), reverse=True):
                key = (chains[blocks], tuple(ids[start : start + length]))
                if key in self._ends:
                    self._ends.move_to_end(key)
                    return self._ends[key]
        return None

    def clear(self) -> None:
        self._ends.clear()
        self._tails.clear()

    def _forget_oldest(self) -> None:
        (chain, tail), _ = self._ends.popitem(last=False)
        lengths = self._tails[chain]
        lengths[len(tail)] -= 1
        if not lengths[len(tail)]:
            del lengths[len(tail)]
        if not lengths:
            del self._tails[chain]


def _extend(chain: Chain, ids: Sequence[int]) -> Chain:
    value, last = chain.hash, chain.last
    blocks = len(ids) // BLOCK
    for start in range(0, blocks * BLOCK, BLOCK):
        last = tuple(ids[start : start + BLOCK])
        value = hash((value, last))
    return Chain(chain.blocks + blocks, value, last)
