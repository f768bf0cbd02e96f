"""Every error of this package, each with the one condition that raises it."""

__all__ = [
    "BadConfig",
    "BadManifest",
    "BadTensor",
    "CorruptBucket",
    "EngineRefused",
    "Fenced",
    "LayoutChanged",
    "Missing",
    "StoreError",
    "StoreFull",
    "StoreUnavailable",
    "Superseded",
    "VersionConflict",
    "VersionGone",
    "VersionTimeout",
    "WeightSyncError",
]


class WeightSyncError(Exception):
    """Base of all errors of this package."""


class BadConfig(WeightSyncError, ValueError):
    """Raised when an argument or a store URL cannot be used; names the argument, its value and what is allowed."""


class BadTensor(WeightSyncError, ValueError):
    """Raised when a tensor cannot be carried or loaded (unknown dtype, a name twice, another shape); names it."""


class BadManifest(WeightSyncError):
    """Raised when a manifest does not decode, contradicts itself, or is of a newer format than this reader."""


class LayoutChanged(WeightSyncError, ValueError):
    """Raised when a version's tensors differ from the published ones in name, dtype, shape, tie or bucket size."""


class VersionConflict(WeightSyncError):
    """Raised when a version is published again with other content, or is older than the latest one."""


class Fenced(WeightSyncError):
    """Raised when a publisher finds that another publisher has taken over its store."""


class VersionTimeout(WeightSyncError, TimeoutError):
    """Raised when a version is not published, or does not appear, within the deadline; says what is there."""


class VersionGone(WeightSyncError):
    """Raised when a version was skipped or has been removed by retention; says which one is the latest."""


class Superseded(WeightSyncError):
    """Raised when a prefetch was cancelled, or its staging reused, by a prefetch of another version."""


class CorruptBucket(WeightSyncError):
    """Raised when a bucket fails its checksum twice, or staged bytes are not those that were published."""


class StoreError(WeightSyncError):
    """Raised when a store fails an operation for a reason that has no type of its own."""


class Missing(StoreError):
    """Raised when an object is not, or not yet, in the store; names its key."""


class StoreFull(StoreError):
    """Raised when a store has no room for an object; says its size and what to enlarge."""


class StoreUnavailable(StoreError):
    """Raised when a store does not answer, or a library or process that it needs is missing."""


class EngineRefused(WeightSyncError):
    """Raised when an inference engine did not take the weights; it must serve nothing until a good load."""
