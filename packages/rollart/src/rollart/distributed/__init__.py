"""Workers in Ray actors on resources that a resource manager bound, called through a Cluster."""

from rollart.distributed.call import Call
from rollart.distributed.cluster import Cluster, ClusterStats
from rollart.distributed.decorators import affinity_of, hw_mapping, register, register_serverless
from rollart.distributed.errors import (
    DistributedError,
    NoTarget,
    NotRunning,
    RemoteError,
    SessionFailed,
    WorkerDied,
)
from rollart.distributed.failover import FailoverStats
from rollart.distributed.member import ActorOptions
from rollart.distributed.placement import on_node
from rollart.distributed.session import RaySession
from rollart.distributed.worker import Layout, Worker, WorkerInfo

__all__ = [
    "ActorOptions",
    "Call",
    "Cluster",
    "ClusterStats",
    "DistributedError",
    "FailoverStats",
    "Layout",
    "NoTarget",
    "NotRunning",
    "RaySession",
    "RemoteError",
    "SessionFailed",
    "Worker",
    "WorkerDied",
    "WorkerInfo",
    "affinity_of",
    "hw_mapping",
    "on_node",
    "register",
    "register_serverless",
]
