"""What a rollout is made of: plain values, msgspec-encodable so that a checkpoint can carry them.

Invariant: a trajectory survives msgpack and JSON unchanged (test_envmanager_values.py::test_round_trip).
Times are those of the running loop's clock.
"""

from typing import Any, Literal

import msgspec

from envmanager.checks import check_count, check_seconds


class Span(msgspec.Struct, frozen=True):
    """Tokens [start, end) of one generation, made by one version of the weights."""

    version: int
    start: int
    end: int


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy answers: the text for the environment, and the tokens for the trainer.

    `prompt_ids` are the tokens of this turn that the policy did not generate. `new_segment` says that the
    context starts anew with them (a task that shows only the latest state); otherwise they are appended to
    everything before.
    """

    text: str
    token_ids: list[int] = []
    logprobs: list[float] = []
    spans: list[Span] = []
    prompt_ids: list[int] = []
    new_segment: bool = False


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One observation, the action that answered it, and what the environment paid."""

    observation: str
    action: str
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    spans: list[Span]
    new_segment: bool
    reward: float
    generate_at: float
    generate_s: float
    env_at: float
    env_s: float


class Outcome(msgspec.Struct, frozen=True):
    """Why a trajectory ended. Failed and cancelled episodes leave no trajectory, so they have no outcome.

    terminated, truncated: the environment said so. max_turns: the limit. stopped: the policy returned None.
    """

    kind: Literal["terminated", "truncated", "max_turns", "stopped"]
    turns: int


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """`started` and `ended` are instants, the rest are durations; scoring comes after `ended`."""

    started: float
    reset_s: float
    ended: float
    reward_s: float = 0.0


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """One finished episode. `reward` is the sum of the turns' until a reward client has scored it."""

    id: str
    key: str
    seed: int
    task: str
    turns: list[Turn]
    reward: float
    outcome: Outcome
    timings: Timings
    metadata: dict[str, Any] = {}

    @property
    def tokens(self) -> int:
        """Tokens that the policy generated."""
        return sum(len(turn.token_ids) for turn in self.turns)


class Episode(msgspec.Struct, kw_only=True):
    """A running episode as its policy sees it. `state` is the policy's own memory and dies with the
    episode.
    """

    id: str
    key: str
    seed: int
    ticket: Any = None
    task: str = "default"
    observation: str = ""
    info: dict[str, Any] = {}
    turns: list[Turn] = []
    state: Any = None

    @property
    def tokens(self) -> int:
        """Tokens that the policy generated so far."""
        return sum(len(turn.token_ids) for turn in self.turns)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one episode, in turns and seconds; None is no bound. Closing and scoring are outside the
    episode's bound.

    `reset_timeout` covers making the environment too. `turn_timeout` covers generating and stepping.
    `reset_retries`: an infrastructure failure before the first generation is retried in place, with
    back-off, that many times.
    """

    max_turns: int = 100
    reset_timeout: float | None = 300.0
    step_timeout: float | None = 300.0
    turn_timeout: float | None = 1800.0
    episode_timeout: float | None = 14400.0
    close_timeout: float = 10.0
    reward_timeout: float | None = 600.0
    reset_retries: int = 2

    def __post_init__(self) -> None:
        check_count("Limits.max_turns", self.max_turns, 1)
        check_count("Limits.reset_retries", self.reset_retries, 0)
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name == "close_timeout":
                check_seconds(f"Limits.{name}", value)
            elif name.endswith("_timeout") and value is not None:
                check_seconds(f"Limits.{name}", value, "positive seconds, or None for no bound")
