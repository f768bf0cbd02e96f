"""One lightweight controller per environment: trajectory-level rollout, redundancy, overlapped rewards."""

from .collect import Collection, Group, collect
from .errors import (
    Busy,
    Closed,
    DataError,
    DeadlineExceeded,
    EnvManagerError,
    InfrastructureError,
    PolicyError,
    RewardError,
    RolloutError,
    Starved,
    UnknownEnv,
)
from .groups import Budgets, LocalGroups, LocalTicket
from .host import nonblocking
from .latency import LatencyEnv
from .manager import EnvManager
from .protocols import Env, Groups, MakeEnv, Observer, Policy, RewardClient, Ticket
from .scheduler import RolloutScheduler, seed_of
from .stats import Histogram, Lengths, Stats
from .values import Action, Episode, Limits, Outcome, Span, Timings, Trajectory, Turn

__all__ = [
    "Action",
    "Budgets",
    "Busy",
    "Closed",
    "Collection",
    "DataError",
    "DeadlineExceeded",
    "Env",
    "EnvManager",
    "EnvManagerError",
    "Episode",
    "Group",
    "Groups",
    "Histogram",
    "InfrastructureError",
    "LatencyEnv",
    "Lengths",
    "Limits",
    "LocalGroups",
    "LocalTicket",
    "MakeEnv",
    "Observer",
    "Outcome",
    "Policy",
    "PolicyError",
    "RewardClient",
    "RewardError",
    "RolloutError",
    "RolloutScheduler",
    "Span",
    "Starved",
    "Stats",
    "Ticket",
    "Timings",
    "Trajectory",
    "Turn",
    "UnknownEnv",
    "collect",
    "nonblocking",
    "seed_of",
]
