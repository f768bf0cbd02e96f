"""A resource manager over a shared metadata store: pools, affinity, fallback, leases, failover."""

from resmgr.errors import (
    BindingBusy,
    BindTimeout,
    Closed,
    EventsLost,
    Infeasible,
    Invalid,
    NotAStore,
    NotPlaced,
    PoolMismatch,
    ResmgrError,
    StaleBinding,
    StoreError,
    StoreMismatch,
    StoreUnavailable,
    UnknownHardware,
)
from resmgr.manager import ResourceManager, Stats
from resmgr.status import PoolStatus, Status, Waiting
from resmgr.values import Allocation, Binding, Event, Node, Pool, Request

__all__ = [
    "Allocation",
    "BindTimeout",
    "Binding",
    "BindingBusy",
    "Closed",
    "Event",
    "EventsLost",
    "Infeasible",
    "Invalid",
    "Node",
    "NotAStore",
    "NotPlaced",
    "Pool",
    "PoolMismatch",
    "PoolStatus",
    "Request",
    "ResmgrError",
    "ResourceManager",
    "StaleBinding",
    "Stats",
    "Status",
    "StoreError",
    "StoreMismatch",
    "StoreUnavailable",
    "UnknownHardware",
    "Waiting",
]
