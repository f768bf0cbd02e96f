"""One lightweight controller per environment: trajectory-level rollout, redundancy, overlapped rewards."""

from envmanager.barrier import Barrier
from envmanager.circuit import Circuit
from envmanager.collect import Collection, Group, collect
from envmanager.errors import (
    BackendDown,
    Busy,
    Closed,
    ClusterError,
    DataError,
    DeadlineExceeded,
    EnvManagerError,
    Evicted,
    ImagePullFailed,
    InfrastructureError,
    MissingExtra,
    NodeLost,
    PodDied,
    PodLost,
    PolicyError,
    QuotaExceeded,
    RewardError,
    RolloutError,
    Starved,
    UnknownEnv,
)
from envmanager.groups import Budgets, LocalGroups, LocalTicket
from envmanager.host import nonblocking
from envmanager.latency import LatencyEnv
from envmanager.manager import EnvManager
from envmanager.protocols import Env, Groups, MakeEnv, Observer, Policy, RewardClient, Ticket
from envmanager.scheduler import RolloutScheduler, seed_of
from envmanager.stats import Histogram, Lengths, Stats
from envmanager.values import Action, Episode, Limits, Outcome, Span, Timings, Trajectory, Turn
from envmanager.watchdog import Stuck

__all__ = [
    "Action",
    "BackendDown",
    "Barrier",
    "Budgets",
    "Busy",
    "Circuit",
    "Closed",
    "ClusterError",
    "Collection",
    "DataError",
    "DeadlineExceeded",
    "Env",
    "EnvManager",
    "EnvManagerError",
    "Episode",
    "Evicted",
    "Group",
    "Groups",
    "Histogram",
    "ImagePullFailed",
    "InfrastructureError",
    "LatencyEnv",
    "Lengths",
    "Limits",
    "LocalGroups",
    "LocalTicket",
    "MakeEnv",
    "MissingExtra",
    "NodeLost",
    "Observer",
    "Outcome",
    "PodDied",
    "PodLost",
    "Policy",
    "PolicyError",
    "QuotaExceeded",
    "RewardClient",
    "RewardError",
    "RolloutError",
    "RolloutScheduler",
    "Span",
    "Starved",
    "Stats",
    "Stuck",
    "Ticket",
    "Timings",
    "Trajectory",
    "Turn",
    "UnknownEnv",
    "collect",
    "nonblocking",
    "seed_of",
]
