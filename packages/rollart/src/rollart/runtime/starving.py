"""A run whose trajectories all fail ends with the reason; it does not play on for ever.

Tasks never run out, so that no batch would ever fill where every environment or every reward fails. An outage passes:
only when nothing has finished for as long as the longest episode may take, and a batch's worth of groups was given up
meanwhile, is there no hope (tests/rollart/test_rollart_starving.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rollart.config import Config
from samplebuffer import Starved, Stats

_LOOKS = 20


def longest_episode(config: Config) -> float:
    """Seconds that the longest episode of a run may take."""
    return max(task.episode_timeout_s or config.rollout.episode_timeout_s for task in config.tasks.values())


async def starving(stats: Callable[[], Stats], groups: int, patience_s: float) -> None:
    """Returns never; raises Starved when `groups` were given up and nothing finished for `patience_s` seconds."""
    clock = asyncio.get_running_loop().time
    finished, since, before = -1, clock(), 0
    while True:
        now = stats()
        ledger = now.ledger
        ended = ledger.buffered + ledger.delivered + ledger.surplus + ledger.filtered
        if ended != finished:
            finished, since, before = ended, clock(), now.groups.given_up
        lost = now.groups.given_up - before
        if lost >= groups and clock() - since >= patience_s:
            last = now.given_up[-1]
            raise Starved(
                f"no trajectory has finished for {clock() - since:.0f} s, while {lost} groups were given up; the "
                f"last ({last.key!r}): {last.error}; mend the environment or its reward, then resume",
                ledger,
            )
        await asyncio.sleep(patience_s / _LOOKS)
