"""Bucketized, versioned, transactional weight publication and pull."""

from weightsync.assembly import Part, combined
from weightsync.errors import (
    BadConfig,
    BadManifest,
    BadTensor,
    CorruptBucket,
    EngineRefused,
    Fenced,
    LayoutChanged,
    Missing,
    StoreError,
    StoreFull,
    StoreUnavailable,
    Superseded,
    VersionConflict,
    VersionGone,
    VersionTimeout,
    WeightSyncError,
)
from weightsync.files import FileStore
from weightsync.inspection import VersionInfo, inspect
from weightsync.manifest import Bucket, Manifest, Plan, Shard, TensorMeta
from weightsync.publisher import Publisher, PublisherStats, Push
from weightsync.sharding import ShardedSubscriber
from weightsync.shm import SharedMemoryStore
from weightsync.store import MemoryStore, Store
from weightsync.subscriber import Commit, Load, Staged, Subscriber, SubscriberStats
from weightsync.tensors import Tensor
from weightsync.throttle import ThrottledStore
from weightsync.urls import open_store

__all__ = [
    "BadConfig",
    "BadManifest",
    "BadTensor",
    "Bucket",
    "Commit",
    "CorruptBucket",
    "EngineRefused",
    "Fenced",
    "FileStore",
    "LayoutChanged",
    "Load",
    "Manifest",
    "MemoryStore",
    "Missing",
    "Part",
    "Plan",
    "Publisher",
    "PublisherStats",
    "Push",
    "Shard",
    "ShardedSubscriber",
    "SharedMemoryStore",
    "Staged",
    "Store",
    "StoreError",
    "StoreFull",
    "StoreUnavailable",
    "Subscriber",
    "SubscriberStats",
    "Superseded",
    "Tensor",
    "TensorMeta",
    "ThrottledStore",
    "VersionConflict",
    "VersionGone",
    "VersionInfo",
    "VersionTimeout",
    "WeightSyncError",
    "combined",
    "inspect",
    "open_store",
]
