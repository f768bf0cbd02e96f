"""Bucketized, versioned, transactional weight publication and pull."""

from weightsync.errors import *  # noqa: F403
from weightsync.errors import __all__ as _errors
from weightsync.files import FileStore
from weightsync.inspection import VersionInfo, inspect
from weightsync.manifest import Bucket, Manifest, Plan, Shard, TensorMeta
from weightsync.publisher import Publisher, Push
from weightsync.sharding import Part, ShardedSubscriber
from weightsync.shm import SharedMemoryStore
from weightsync.store import MemoryStore, Missing, Store
from weightsync.subscriber import Commit, Load, Staged, Subscriber
from weightsync.tensors import Tensor
from weightsync.throttle import ThrottledStore
from weightsync.urls import open_store

__all__ = [
    "Bucket",
    "Commit",
    "FileStore",
    "Load",
    "Manifest",
    "MemoryStore",
    "Missing",
    "Part",
    "Plan",
    "Publisher",
    "Push",
    "Shard",
    "ShardedSubscriber",
    "SharedMemoryStore",
    "Staged",
    "Store",
    "Subscriber",
    "Tensor",
    "TensorMeta",
    "ThrottledStore",
    "VersionInfo",
    "inspect",
    "open_store",
    *_errors,
]
