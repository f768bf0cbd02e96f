"""What a run finds is not searched for garbage; what it leaves behind is."""

from __future__ import annotations

import gc
import weakref

from rollart.runtime.garbage import rarely_searched


class Node:
    def __init__(self) -> None:
        self.itself = self


def test_what_was_there_is_left_out_and_new_cycles_are_found() -> None:
    thresholds = gc.get_threshold()
    kept: list[list[int]] = [[] for _ in range(10_000)]
    with rarely_searched():
        assert len(gc.get_objects()) < len(kept)
        cycle = weakref.ref(Node())
        gc.collect()
        assert cycle() is None
    assert gc.get_threshold() == thresholds and gc.get_freeze_count() == 0


def test_cycles_of_a_run_do_not_pile_up() -> None:
    with rarely_searched():
        cycles = [weakref.ref(Node()) for _ in range(50_000)]
        assert sum(cycle() is not None for cycle in cycles) < 11_000
