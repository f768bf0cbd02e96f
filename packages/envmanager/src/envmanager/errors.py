"""Every error of the package. A rollout's failure carries its kind, which chooses the budget it is charged
to.

Invariant: whatever goes wrong in an episode reaches the caller as a `RolloutError` with `kind`, `key` and
`phase` filled in (test_envmanager_manager.py::test_every_failure_is_typed_and_says_where).
"""

from typing import Any, ClassVar, Literal, Self

Kind = Literal["infrastructure", "data", "timeout", "policy", "reward"]
KINDS: tuple[Kind, ...] = ("infrastructure", "data", "timeout", "policy", "reward")


class EnvManagerError(Exception):
    """Base of the package's errors. Raised when: never itself."""


class RolloutError(EnvManagerError):
    """One episode failed; nothing else did. Raised when: never itself, see the kinds below."""

    kind: ClassVar[Kind]
    key: str = ""
    phase: str = ""

    def bare(self) -> Self:
        """Without tracebacks: their frames hold whole episodes, and whoever keeps failures would keep those."""
        cause: BaseException | None = self
        while cause is not None:
            cause.__traceback__ = None
            cause = cause.__cause__
        return self

    def __str__(self) -> str:
        where = f"{self.key!r} in {self.phase}: " if self.phase else ""
        return where + super().__str__()


class InfrastructureError(RolloutError):
    """Raised when the machinery under an environment failed (process died, connection lost, memory limit)."""

    kind = "infrastructure"


class ClusterError(InfrastructureError):
    """Raised when the Kubernetes API does not answer, or refuses a request for good."""


class Missing(ClusterError):
    """Raised when the Kubernetes API knows no such object (404)."""


class Conflict(ClusterError):
    """Raised when an object of that name exists, or is another than the one meant (409)."""


class Expired(ClusterError):
    """Raised when a watch asks for a resource version that the API server has forgotten (410)."""


class QuotaExceeded(ClusterError):
    """Raised when the namespace's quota leaves no room for another pod (403), and none was freed in time."""


class PodLost(InfrastructureError):
    """Raised when a pod was deleted by somebody else, or did not become ready in time."""


class ImagePullFailed(PodLost):
    """Raised when a pod's image cannot be pulled."""


class Evicted(PodLost):
    """Raised when the cluster took a pod away: node pressure, preemption, a drained node."""


class NodeLost(PodLost):
    """Raised when the node of a pod no longer answers, or is gone."""


class PodDied(PodLost):
    """Raised when a pod's process ended: crashed, out of memory, past its lifetime."""


class DataError(RolloutError):
    """Raised when an environment or its task is at fault: it raised, or broke the five-tuple contract."""

    kind = "data"


class DeadlineExceeded(RolloutError):
    """Raised when reset, step, turn, episode or reward took longer than its limit."""

    kind = "timeout"


class PolicyError(RolloutError):
    """Raised when the policy raised or returned an action that contradicts itself."""

    kind = "policy"


class RewardError(RolloutError):
    """Raised when a reward client failed or scored something other than a finite number."""

    kind = "reward"


class Busy(EnvManagerError):
    """Raised when an EnvManager is asked to run a second episode while its first is running."""


class Closed(EnvManagerError):
    """Raised when a ticket is asked of groups that issue no more."""


class BackendDown(EnvManagerError):
    """Raised when every episode fails, through pause after pause, so that going on is of no use."""


class UnknownEnv(EnvManagerError, ValueError):
    """Raised when an environment's name has an unknown scheme, a missing extra or no such factory."""


class MissingExtra(EnvManagerError, ImportError):
    """Raised when something is asked for that needs a library which is not installed; names the extra."""


class Starved(EnvManagerError):
    """Raised when so many groups were given up that the wanted number cannot be reached. `results` holds
    what there is.
    """

    results: Any = None
