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
from .routing import AffinityRouter, Router, less_loaded
from .sim import SimWorker
from .values import (
    Ack,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Partial,
    Sampling,
    Span,
    Timing,
    extend_partial,
)
from .worker import Role, WeightLoader, Worker

__all__ = [
    "ANY",
    "Aborted",
    "Ack",
    "AffinityRouter",
    "Closed",
    "DuplicateRequest",
    "FinishReason",
    "Fleet",
    "GenerateRequest",
    "GenerateResult",
    "Interrupted",
    "InvalidRequest",
    "LLMProxy",
    "LLMProxyError",
    "NoWorker",
    "Partial",
    "ProxyConfig",
    "ProxyStats",
    "RetriesExhausted",
    "Role",
    "Router",
    "Sampling",
    "SimWorker",
    "Slot",
    "Span",
    "Timing",
    "UpdateFailed",
    "WeightLoader",
    "Worker",
    "WorkerLost",
    "WorkerStats",
    "WrongState",
    "extend_partial",
    "less_loaded",
]
