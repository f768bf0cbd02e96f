"""Evaluation: every held-out task instance is played once by the served policy.

It uses trajectories of its own that no buffer sees, so it cannot disturb the bound. An episode that fails is
counted and left out of the mean, never taken for a zero (tests/rollart/test_rollart_evaluator.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from envmanager import Limits, MakeEnv, Policy, Starved, collect

log = logging.getLogger(__name__)


class Evaluator:
    """Measures the success rate: the share of episodes whose reward is above zero."""

    def __init__(
        self,
        make_env: MakeEnv,
        make_policy: Callable[[str], Policy],
        keys: Sequence[str],
        *,
        concurrency: int,
        limits: Limits | Callable[[str], Limits],
    ) -> None:
        self._make_env = make_env
        self._make_policy = make_policy
        self._keys = keys
        self._concurrency = concurrency
        self._limits = limits
        self._rounds = 0
        self.by_task: dict[str, float] = {}
        """The latest success rate of each task."""

    async def success(self) -> float:
        """The success rate over the episodes that finished. Raises Starved when none did."""
        self._rounds += 1
        policy = self._make_policy(f"eval-{self._rounds}-")
        try:
            played = await collect(
                self._make_env, policy, self._keys, concurrency=self._concurrency, limits=self._limits
            )
        except Starved as starved:
            if starved.results is None or not starved.results.trajectories:
                raise
            played = starved.results
            log.warning("evaluation: %d of %d episodes failed", len(played.given_up), len(self._keys))
        reached: dict[str, list[bool]] = {}
        for trajectory in played.trajectories:
            reached.setdefault(trajectory.task, []).append(trajectory.reward > 0)
        self.by_task = {task: sum(each) / len(each) for task, each in reached.items()}
        return sum(map(sum, reached.values())) / len(played.trajectories)
