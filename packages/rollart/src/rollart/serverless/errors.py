"""The errors of rollart.serverless."""

from __future__ import annotations

from rollart.errors import RollArtError


class ServerlessError(RollArtError):
    """Base of the errors of this subpackage. `code` is the HTTP status that tells of it."""

    code = 500


class BadFunction(ServerlessError):
    """Raised when MODULE:FUNCTION cannot be imported, or a server is asked to listen where anybody could call it."""


class BadCall(ServerlessError):
    """Raised when a body is no JSON, or not what the function's annotation says; repeating it changes nothing."""

    code = 400


class KeyReused(ServerlessError):
    """Raised when an idempotency key comes again with another body."""

    code = 422


class Busy(ServerlessError):
    """Raised when all workers are busy and the queue is full; `retry_after` seconds are a good time to come again."""

    code = 429

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class FunctionFailed(ServerlessError):
    """Raised when the function raises, or returns what is neither a finite number nor JSON."""

    code = 500


class WorkerLost(ServerlessError):
    """Raised when the worker's process ends during a call, or does not start."""

    code = 502


class Draining(ServerlessError):
    """Raised when a call comes while the server ends."""

    code = 503


class CallTimeout(ServerlessError):
    """Raised when a call takes longer than its timeout; its process is ended."""

    code = 504
