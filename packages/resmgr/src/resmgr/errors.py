"""Errors of the package. Each says when it is raised; messages name the field, the value and the remedy."""


class ResmgrError(Exception):
    """Raised when: never itself; the base of every error below."""


class Invalid(ResmgrError, ValueError):
    """Raised when a value (of a pool, a request, a URL) is wrong in itself, before anything is sent."""


class Infeasible(ResmgrError):
    """Raised when no class of the request could hold it even if everything were free; says what would fit."""


class UnknownHardware(Infeasible):
    """Raised when a request names a hardware class that no pool has."""


class BindTimeout(ResmgrError, TimeoutError):
    """Raised when what was asked did not become free within the timeout; nothing is held."""


class NotPlaced(ResmgrError):
    """Raised when Kubernetes refuses a pod of a binding, or the pod fails; none of the binding's pods is left."""


class StaleBinding(ResmgrError):
    """Raised when a binding is used that was released, lost, or granted again under a higher token."""


class BindingBusy(ResmgrError):
    """Raised when a binding is reconfigured while an earlier reconfigure of it still waits."""


class PoolMismatch(ResmgrError):
    """Raised when a pool is registered under a name that another definition has."""


class StoreError(ResmgrError):
    """Raised when: never itself; the base of what can be wrong with the store."""


class StoreUnavailable(StoreError):
    """Raised when the store cannot be reached, or not started, within the patience of the caller."""


class NotAStore(StoreError):
    """Raised when what answers at the URL is not a Redis-protocol server of version 7 or later."""


class StoreMismatch(StoreError):
    """Raised when the store holds another schema version or foreign keys, or runs live leases with another TTL."""


class EventsLost(ResmgrError):
    """Raised when a watcher resumes where the bounded event stream no longer reaches."""


class Closed(ResmgrError):
    """Raised when a manager is used after `close`, or after its lease task failed."""
