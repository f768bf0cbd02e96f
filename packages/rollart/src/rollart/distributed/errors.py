"""The errors of rollart.distributed."""

from __future__ import annotations

from rollart.distributed.worker import WorkerInfo
from rollart.errors import RollArtError


class DistributedError(RollArtError):
    """Base of the errors of this subpackage."""


class SessionFailed(DistributedError):
    """Raised when the local Ray does not start; the message ends with the last lines of its log."""


class NotRunning(DistributedError):
    """Raised when a cluster is used before `start` or after `stop`, or is started twice."""


class NoTarget(DistributedError):
    """Raised when no living worker may serve a call, fallbacks included."""


class RemoteError(DistributedError):
    """Raised when a worker's method raises: `line` names the exception, `original` is it where it could come over."""

    def __init__(self, who: WorkerInfo, method: str, line: str, trace: str, original: Exception | None) -> None:
        super().__init__(f"{_told(who)} raised in {method}: {line}\n{trace}")
        self.worker = who.name
        self.role = who.role
        self.rank = who.rank
        self.node = who.node
        self.method = method
        self.line = line
        self.original = original
        self.trace = trace


class WorkerDied(DistributedError):
    """Raised when a worker's process has died or could not be set up; `log` holds its last lines."""

    def __init__(self, who: WorkerInfo, reason: str, log: str) -> None:
        told = f"; its last lines:\n{log}" if log else "; its log holds nothing"
        super().__init__(f"{_told(who)} is dead: {reason}{told}")
        self.worker = who.name
        self.role = who.role
        self.rank = who.rank
        self.node = who.node
        self.reason = reason
        self.log = log


def in_words(error: BaseException) -> str:
    """What an error says, without the traceback that came from another process: logs have that."""
    return str(error).removesuffix(error.trace).rstrip() if isinstance(error, RemoteError) else str(error)


def _told(who: WorkerInfo) -> str:
    return f"{who.name} (role {who.role}, rank {who.rank}, node {who.node})"
