"""Python's search for unreachable cycles, made rare while a run goes on.

A search of all objects takes half a second in a process that has imported what a driver needs, and the loop stands
still meanwhile. What is there when a run begins stays to its end, so it is left out; and cycles are few, so the young
are searched when there are many. Held by tests/rollart/test_rollart_garbage.py.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Those of about a thousand turns.
_YOUNG = 10_000


@contextmanager
def rarely_searched(young: int = _YOUNG) -> Iterator[None]:
    """As before afterwards. So many new objects lie between two searches."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(young, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
