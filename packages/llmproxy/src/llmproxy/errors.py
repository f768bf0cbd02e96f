"""Everything that llmproxy raises, each class with the one situation that raises it.

`args` are the constructor's, so that errors survive pickling on their way from another process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .values import Ack, Partial


class LLMProxyError(Exception):
    """Base class of all errors of this package."""


class InvalidRequest(LLMProxyError, ValueError):
    """Raised when a request cannot be served as written; nothing has been queued.

    `field` names the offending field, `limit` what it may be.
    """

    def __init__(self, field: str, problem: str, limit: str) -> None:
        super().__init__(field, problem, limit)
        self.field = field
        self.problem = problem
        self.limit = limit

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}; must be {self.limit}"


class DuplicateRequest(InvalidRequest):
    """Raised when a trajectory (or request id) that is still in flight is submitted again."""


class NoWorker(LLMProxyError):
    """Raised when no worker can serve a request: there is none, or none proved the version in time."""


class WorkerLost(LLMProxyError):
    """Raised by a worker that died or cannot be reached; `partial` is what is known of the generation."""

    def __init__(self, worker: str, reason: str, partial: Partial | None = None) -> None:
        super().__init__(worker, reason, partial)
        self.worker = worker
        self.reason = reason
        self.partial = partial

    def __str__(self) -> str:
        return f"worker {self.worker} is lost: {self.reason}"


class RetriesExhausted(LLMProxyError):
    """Raised when a request lost as many workers as it was allowed attempts."""

    def __init__(self, request_id: str, attempts: int, last: WorkerLost) -> None:
        super().__init__(request_id, attempts, last)
        self.request_id = request_id
        self.attempts = attempts
        self.last = last

    def __str__(self) -> str:
        return f"request {self.request_id} gave up after {self.attempts} attempts; the last: {self.last}"


class Aborted(LLMProxyError):
    """Raised from `generate` when the request was aborted through the proxy."""


class Interrupted(LLMProxyError):
    """Raised from `generate` when the request was interrupted; `partial` lets a later request go on."""

    def __init__(self, request_id: str, partial: Partial) -> None:
        super().__init__(request_id, partial)
        self.request_id = request_id
        self.partial = partial

    def __str__(self) -> str:
        return f"request {self.request_id} was interrupted after {len(self.partial.token_ids)} tokens"


class UpdateFailed(LLMProxyError):
    """Raised when a weight update did not leave the fleet fit to serve, or a worker could not load."""

    def __init__(self, version: int, failures: Sequence[Ack]) -> None:
        super().__init__(version, failures)
        self.version = version
        self.failures = list(failures)

    def __str__(self) -> str:
        told = "; ".join(f"{ack.worker}: {ack.error}" for ack in self.failures)
        return f"update to version {self.version} failed: {told}"


class WrongState(LLMProxyError):
    """Raised when a call does not fit the state: an update without suspend, an illegal ledger move."""


class Closed(LLMProxyError):
    """Raised when the proxy or worker has been closed."""
