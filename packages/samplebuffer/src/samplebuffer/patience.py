"""How long a batch that could be handed out waits for groups that the next version would end.

Handing out at once lets the served version advance, and a group at the bound that is nearly complete loses all its
work. Waiting for it costs time. Neither is known beforehand to be the cheaper, so the wait lasts until both have cost
the same: `k` groups of a batch of `B` are worth `k / B` of the time that a batch takes. Whatever happens then costs
at most twice what knowing the future would (the ski-rental argument: Karlin, Manasse, Rudolph and Sleator,
"Competitive snoopy caching", Algorithmica 3, 1988).

Invariant: no wait lasts longer than `share` times the time of a batch
(tests/samplebuffer/test_samplebuffer_patience.py).
"""

from __future__ import annotations


class Patience:
    """Measures what a batch takes, without the waits themselves, and says how long the next may wait."""

    def __init__(self, share: float) -> None:
        """`share`: of the cost of the groups at stake that may be spent on waiting; 0 never waits."""
        self.share = share
        self._last: float | None = None
        self._batch_s = 0.0
        self.waited = 0.0
        """Seconds spent so far."""

    def seconds(self, at_stake: int, batch_groups: int) -> float:
        """How long to wait in all for `at_stake` groups; 0 before the time of a batch is known."""
        return self.share * self._batch_s * min(1.0, at_stake / batch_groups)

    def handed_out(self, now: float, waited: float) -> None:
        """A batch left at `now`, after `waited` seconds of patience."""
        if self._last is not None:
            self._batch_s = max(0.0, now - self._last - waited)
        self._last = now
        self.waited += waited
