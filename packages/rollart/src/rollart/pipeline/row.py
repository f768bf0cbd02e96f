"""One iteration as a row of metrics: the keys of metrics.jsonl, in the order in which a reader asks.

Invariant: every required key is there, and numbers that were not measured are None, never 0
(tests/rollart/test_rollart_row.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from rollart.observe.metrics import Row, histogram
from rollart.pipeline.iteration import Iteration
from samplebuffer import Batch
from samplebuffer import Stats as BufferStats

_ROLES = ("driver", "engines", "trainer")
_UNKNOWN: Mapping[str, float] = MappingProxyType({})


def metrics_row(
    iteration: Iteration, stats: BufferStats, *, elapsed_s: float, tokens: int, cpu: Mapping[str, float] = _UNKNOWN
) -> Row:
    """The row of an iteration; `tokens` is how many were generated in it, `elapsed_s` the run's time at its end,
    `cpu` the CPU seconds that each role's processes took meanwhile, as far as known.

    `staleness/over` is the share of the trained trajectories beyond the bound: 0 in every mode that evicts.
    """
    batch: Batch = iteration.batch
    ages = [batch.version - sample.start_version for sample in batch.samples]
    lags = [batch.trainer_version - sample.start_version for sample in batch.samples]
    rewards = [sample.reward for sample in batch.samples]
    switch = iteration.switch
    ledger: Mapping[str, int] = msgspec.structs.asdict(stats.ledger)
    return {
        "step": iteration.step,
        "version": iteration.trained.version,
        "version/served": iteration.served,
        "time": elapsed_s,
        "reward/mean": sum(rewards) / len(rewards),
        **_by_task(batch),
        "success/mean": sum(reward > 0 for reward in rewards) / len(rewards),
        "eval/success": iteration.success,
        "parity/max_abs": switch.parity if switch else None,
        **histogram("staleness", ages),
        "staleness/over": sum(age > stats.max_staleness for age in ages) / len(ages),
        **histogram("lag", lags),
        "off_policy/in_flight": stats.off_policy.in_flight.mean,
        "off_policy/in_queue": stats.off_policy.in_queue.mean,
        "tokens_per_s": tokens / iteration.time.wall,
        "trained_tokens": sum(sample.payload.tokens for sample in batch.samples),
        "push_s": switch.staged.push_s if switch else None,
        "push_bytes": switch.staged.nbytes if switch else None,
        **{f"push_bytes/train-{n}": nbytes for n, nbytes in enumerate(switch.staged.ranks if switch else ())},
        "pull_accumulated_s": switch.staged.pull_s if switch else None,
        "pull_exposed_s": switch.exposed_s if switch else None,
        **iteration.time.metrics(),
        **{f"{role}/cpu_s": cpu.get(role) for role in _ROLES},
        "driver/cpu_share": cpu["driver"] / iteration.time.wall if "driver" in cpu else None,
        **{f"ledger/{column}": count for column, count in ledger.items()},
        **{f"train/{name}": value for name, value in iteration.trained.metrics.items()},
    }


def _by_task(batch: Batch) -> Row:
    """The mean reward of each task, where the batch holds several."""
    rewards: dict[str, list[float]] = {}
    for sample in batch.samples:
        rewards.setdefault(sample.payload.task, []).append(sample.reward)
    if len(rewards) < 2:
        return {}
    return {f"reward/mean/{task}": sum(each) / len(each) for task, each in sorted(rewards.items())}
