"""Dynamic filtering: a group whose rewards are all equal has no group-relative advantage; it is dropped and replaced.

When nothing but such groups comes, no batch ever fills; it says so instead of being silent
(tests/rollart/test_rollart_varied.py).
"""

from __future__ import annotations

import logging

from samplebuffer import Group

log = logging.getLogger(__name__)


class Varied:
    """Keeps groups whose rewards differ. After each `patience` drops in a row there is a warning."""

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._in_a_row = 0

    def __call__(self, group: Group) -> bool:
        rewards = {sample.reward for sample in group.samples}
        if len(rewards) > 1:
            self._in_a_row = 0
            return True
        self._in_a_row += 1
        if self._in_a_row % self._patience == 0:
            log.warning(
                "%d groups in a row had equal rewards (the last: all %g) and were dropped: the tasks are too hard or "
                "too easy for the model; buffer.drop_uniform=false trains on them all the same",
                self._in_a_row,
                next(iter(rewards)),
            )
        return False
