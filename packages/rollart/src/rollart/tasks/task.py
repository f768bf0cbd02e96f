"""What the trainer needs of a task."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from envmanager import Env, Trajectory
from rollart.policy import TurnSettings


class Task(Protocol):
    """One kind of episode: where its instances come from, how turns are generated, what they are worth.

    A key names one instance. Keys of `train_keys` and `eval_keys` never name the same one, and `train_keys` is a pure
    function of the seed, so that skipping the first n keys resumes a run.
    """

    @property
    def settings(self) -> TurnSettings:
        """How a turn is generated."""
        ...

    @property
    def blocking(self) -> bool:
        """True when making an environment may hold up the event loop."""
        ...

    def train_keys(self, seed: int) -> Iterator[str]: ...
    def eval_keys(self, n: int) -> list[str]: ...
    def make_env(self, key: str) -> Env: ...
    async def reward(self, trajectory: Trajectory) -> float: ...
    async def close(self) -> None:
        """Ends what the task runs: processes, connections."""
        ...

    def probe_prompts(self, n: int) -> Sequence[list[int]]:
        """Token ids of prompts as the task makes them, to compare engine and trainer on."""
        ...
