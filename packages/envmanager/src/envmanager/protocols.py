"""The seams: what the package needs from environments, policies, sources of work, rewards and traces.

Structural, so that other libraries fit without importing this one (test_envmanager_scheduler.py runs on a
foreign Groups).
"""

from collections.abc import Callable
from typing import Any, Literal, Protocol

from envmanager.values import Action, Episode, Trajectory

CancelCallback = Callable[[str], None]


class Env(Protocol):
    """A text environment with the five-tuple of Gymnasium, methods plain or async.

    A plain environment is taken to block and gets a thread of its own, unless it has `blocking = False`:
    then it steps on the loop. Optional attributes: `task` (the name by which generation is routed, else
    "default"), `close()`, `kill()`.
    """

    def reset(self, seed: int | None = None) -> Any:
        """-> (observation, info)"""

    def step(self, action: str) -> Any:
        """-> (observation, reward, terminated, truncated, info)"""


MakeEnv = Callable[[str], Any]
"""Makes the environment of a key. Taken to block unless marked with `nonblocking`, or a class of such
environments.
"""


class Policy(Protocol):
    """Chooses actions. `None` ends the episode where it stands (outcome "stopped"): the context is full,
    for instance.

    Cancellation reaches a policy as asyncio's: it must end what it started in the engine and re-raise.
    """

    async def act(self, episode: Episode) -> Action | None: ...


class Ticket(Protocol):
    """One trajectory to run. Exactly one of finish, fail and cancel ends it; a late call is an answer, not
    an error.
    """

    @property
    def id(self) -> Any: ...
    @property
    def key(self) -> str: ...
    @property
    def group_id(self) -> Any: ...
    @property
    def member(self) -> int: ...

    def on_cancel(self, callback: CancelCallback) -> Any:
        """`callback(reason)` when its owner no longer wants the trajectory; at once if that is already so."""

    def stamp(self, version: int) -> Any: ...
    def finish(self, payload: Any, reward: float) -> str:
        """-> "accepted", or why it was not wanted any more."""

    def fail(self, error: Exception) -> Any: ...
    def cancel(self) -> Any: ...


class Groups(Protocol):
    """Where trajectories come from and go to. `next_ticket` waits for room and raises when no more will
    come.
    """

    async def next_ticket(self) -> Ticket: ...


class RewardClient(Protocol):
    """Scores one finished trajectory. An async function will do."""

    async def __call__(self, trajectory: Trajectory) -> float: ...


SpanKind = Literal["reset", "generate", "step", "reward"]


class Observer(Protocol):
    """Receives what each trajectory did and when, to draw a trace. Called on the loop: it must not block, and what
    it raises ends the rollout.
    """

    def __call__(self, kind: SpanKind, id: str, start: float, end: float) -> None: ...
