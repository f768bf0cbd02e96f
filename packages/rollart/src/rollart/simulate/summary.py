"""The numbers of a simulated run that a person compares.

The first iterations fill empty queues and the last commits and evaluates its own weights, so neither counts
(tests/rollart/test_rollart_simulate_summary.py).
"""

from __future__ import annotations

from msgspec import Struct

from rollart.observe.metrics import LEDGER_ENDS, wall_seconds
from rollart.simulate.config import Simulation
from rollart.simulate.run import Simulated

WARM_UP, CLOSING = 2, 1


class Summary(Struct, frozen=True, kw_only=True):
    """Means over the `counted` iterations from `first` on, which took `steps` seconds. `cost` is in H20 device-hours
    per thousand trajectories trained.
    """

    first: int
    counted: int
    step_s: float
    steps: list[float]
    tokens_per_s: float
    cost: float
    staleness: float
    stale: float
    parts: dict[str, float]
    push_s: float
    pull_s: float
    exposed_s: float


def summarize(simulation: Simulation, simulated: Simulated) -> Summary:
    """The summary of a run of at least one iteration; short runs count what they have."""
    rows = simulated.rows
    closing = CLOSING if len(rows) > 1 else 0
    warm_up = min(WARM_UP, len(rows) - closing - 1)
    counted = rows[warm_up : len(rows) - closing]
    number = len(counted)

    def mean(key: str) -> float:
        return sum(float(row.get(key) or 0) for row in counted) / number

    names = {key for row in counted for key in row if key.startswith("time/")}
    parts = {name.removeprefix("time/"): mean(name) for name in sorted(names)}
    step_s = sum(parts.values())
    before = rows[warm_up - 1] if warm_up else {}
    ended = {
        column: (counted[-1][f"ledger/{column}"] or 0) - (before.get(f"ledger/{column}") or 0)
        for column in LEDGER_ENDS
    }
    return Summary(
        first=warm_up + 1,
        counted=number,
        step_s=step_s,
        steps=[wall_seconds(row) for row in counted],
        tokens_per_s=mean("train/batch_tokens") / step_s,
        cost=simulation.cost * step_s / 3600 / simulation.batch * 1000,
        staleness=mean("staleness/mean"),
        stale=ended["stale"] / max(1, sum(ended.values())),
        parts=parts,
        push_s=mean("push_s"),
        pull_s=mean("pull_accumulated_s"),
        exposed_s=mean("pull_exposed_s"),
    )
