"""A trajectory-level gateway over inference workers.

Affinity routing, suspend/update/resume around weight updates, partial generations continued.
"""

from .config import ProxyConfig, ProxyStats, WorkerStats
from .errors import (
    Aborted,
    Closed,
    DuplicateRequest,
    Interrupted,
    InvalidRequest,
    LLMProxyError,
    NoWorker,
    RetriesExhausted,
    UpdateFailed,
    WorkerLost,
    WrongState,
)
from .fleet import ANY, Fleet, Slot
from .proxy import LLMProxy
from .routing import (
    AffinityRouter,
    AutoAffinityRouter,
    CacheAwareRouter,
    PowerOfTwoRouter,
    PrefixIndex,
    RoundRobinRouter,
    Router,
    StickyRouter,
    least_loaded,
    less_loaded,
)
from .sim import SimWorker
from .values import (
    Ack,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Handoff,
    Partial,
    Sampling,
    Span,
    Timing,
    extend_partial,
)
from .worker import DecodeWorker, PrefillWorker, Reports, Role, WeightLoader, Worker

__all__ = [
    "ANY",
    "Aborted",
    "Ack",
    "AffinityRouter",
    "AutoAffinityRouter",
    "CacheAwareRouter",
    "Closed",
    "DecodeWorker",
    "DuplicateRequest",
    "FinishReason",
    "Fleet",
    "GenerateRequest",
    "GenerateResult",
    "Handoff",
    "Interrupted",
    "InvalidRequest",
    "LLMProxy",
    "LLMProxyError",
    "NoWorker",
    "Partial",
    "PowerOfTwoRouter",
    "PrefillWorker",
    "PrefixIndex",
    "ProxyConfig",
    "ProxyStats",
    "Reports",
    "RetriesExhausted",
    "Role",
    "RoundRobinRouter",
    "Router",
    "Sampling",
    "SimWorker",
    "Slot",
    "Span",
    "StickyRouter",
    "Timing",
    "UpdateFailed",
    "WeightLoader",
    "Worker",
    "WorkerLost",
    "WorkerStats",
    "WrongState",
    "extend_partial",
    "least_loaded",
    "less_loaded",
]
