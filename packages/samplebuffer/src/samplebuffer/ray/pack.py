"""Which payloads share an object of Ray's store: a put costs a millisecond, whatever its size.

A pack stays in the store until its last member has ended. Invariant: a pack holds payloads of `limit` bytes and what
the last of them adds, in the order in which they were handed in (tests/samplebuffer/test_samplebuffer_pack.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

DEPTH = 5  # of containers looked into; what lies deeper weighs little or is counted with the pack's age
SMALL = 8  # bytes of a number, and of anything that does not say its size


def weight(value: Any, depth: int = DEPTH) -> int:
    """About how many bytes a payload takes in the store, cheaply: a list that begins with a number holds numbers."""
    if isinstance(size := getattr(value, "nbytes", None), int):
        return size
    if isinstance(value, (bytes, bytearray, str)):
        return len(value)
    if isinstance(value, list) and value and isinstance(value[0], (int, float)):
        return SMALL * len(value)
    if depth and (parts := _parts(value)):
        return sum(weight(part, depth - 1) for part in parts)
    return SMALL


def _parts(value: Any) -> Sequence[Any]:
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, dict):
        return list(value.values())
    kind = type(value)
    names = getattr(kind, "__struct_fields__", ()) or getattr(kind, "__dataclass_fields__", ())
    return [getattr(value, name, None) for name in names]


def packs(weights: Iterable[int], limit: int) -> Iterator[slice]:
    """Cut a row of payloads into packs."""
    start, end, held = 0, 0, 0
    for size in weights:
        end, held = end + 1, held + size
        if held >= limit:
            yield slice(start, end)
            start, held = end, 0
    if start < end:
        yield slice(start, end)
