"""The tasks of a run: what each is played on, its share of the mixture, and its limits.

`tasks` maps a name, by which generation is routed and metrics are reported, to a task. Its `kind` says which keys it
has: one of the kinds below (`frozenlake` where it is left out), or `module:Class`, a class whose `Config` has them.
Held by tests/rollart/test_rollart_config.py and test_rollart_own.py.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from envmanager import UnknownEnv
from envmanager.naming import imported

# The upper ends are where a number can only be a slip of the pen, and would hang or overflow what it goes to.
Count = Annotated[int, Meta(ge=1, lt=2**31)]
Positive = Annotated[float, Meta(gt=0, le=1e9)]
NonNegative = Annotated[float, Meta(ge=0, le=1e9)]


class TaskConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every kind of task has. Its deadlines are those of `rollout` unless they are given here."""

    kind: str = ""
    """`frozenlake`, `env`, or `module:Class`."""
    weight: Positive = 1.0
    """Share of the groups, relative to the other tasks."""
    max_turns: Count = 20
    """After so many an episode ends as truncated."""
    step_timeout_s: Positive | None = None
    """Instead of that of `rollout`."""
    episode_timeout_s: Positive | None = None
    """Instead of that of `rollout`."""
    latency_mean_s: NonNegative = 0.0
    """Injected latency of each turn, normal and clipped at 0: slow environments for tests and benchmarks."""
    latency_std_s: NonNegative = 0.0
    """Its standard deviation."""
    reward_latency_s: NonNegative = 0.0
    """Injected latency of each reward."""

    # Keys where a kind has fields of these names.
    @property
    def max_tokens(self) -> int:
        """Generated tokens a turn, at most; a context has room for them."""
        return 1

    @property
    def latest_only(self) -> bool:
        """Each observation shows the whole state, so every turn starts a new context."""
        return False


class FrozenLakeConfig(TaskConfig, frozen=True):
    """FrozenLake on random maps. `actions_per_turn` symbols are generated each turn and the last one is the move."""

    kind: Literal["frozenlake"] = "frozenlake"
    size: Annotated[int, Meta(ge=3, le=8)] = 4
    """Cells of each side."""
    frozen: Annotated[float, Meta(ge=0.3, le=0.95)] = 0.8
    """Probability of a cell to be ice and not a hole; beyond these limits lakes are too few to hold some out."""
    view: Annotated[int, Meta(ge=3, le=15)] | None = None
    """Cells of the square around the player that it sees, an odd number; None shows the map from above."""
    actions_per_turn: Count = 1
    """Symbols generated each turn."""

    @property
    def max_tokens(self) -> int:
        return self.actions_per_turn

    @property
    def latest_only(self) -> bool:
        return True


class EnvConfig(TaskConfig, frozen=True, kw_only=True):
    """Any environment that envmanager knows by name, played in free text."""

    kind: Literal["env"] = "env"
    env: str
    """Such as `textarena:Mastermind-v0`, `gymnasium:Taxi-v4` or `module:factory?option=value`; or the URL of an
    `envmanager serve-env`, here or on another machine."""
    isolate: bool = False
    """Each episode is played in a process of its own, which can crash, leak or hang without harm."""
    python: str = ""
    """Another interpreter for these processes, with envmanager and a library that cannot live beside the engine's."""
    max_tokens: Count = 64
    """Generated tokens a turn, at most."""
    chat: Literal["qwen3", "llama3", "plain"] = "qwen3"
    """How turns become tokens; `plain` encodes observations as they are."""
    system: str = ""
    """The system message; empty for none."""
    tools: bool = False
    """The action is the tool call in what the model wrote, as `{"name": ..., "arguments": ...}`."""
    latest_only: bool = False
    """Each observation shows the whole state, so every turn starts a new context."""
    reward: str = ""
    """`module:function` of the finished trajectory, or a URL; empty for the sum of the environment's rewards."""


AnyTask = TaskConfig
KINDS: dict[str, type[TaskConfig]] = {"frozenlake": FrozenLakeConfig, "env": EnvConfig}
DEFAULT_KIND = "frozenlake"


def keys_of(kind: object) -> type[TaskConfig]:
    """The keys of a kind. Raises ValueError saying what to write instead."""
    if isinstance(kind, str) and kind in KINDS:
        return KINDS[kind]
    if not isinstance(kind, str) or ":" not in kind:
        raise ValueError(f"must be one of {', '.join(KINDS)}, or module:Class of your own")
    try:
        keys = getattr(imported(kind), "Config", None)
    except UnknownEnv as error:
        raise ValueError(str(error)) from None
    if not (isinstance(keys, type) and issubclass(keys, TaskConfig)):
        raise ValueError("has no keys; give the class a `class Config(rollart.tasks.TaskConfig, frozen=True)`")
    return keys
