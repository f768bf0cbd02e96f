"""What the gateway itself answers when it does not pass on a worker's answer: JSON naming field and limit.

The shape is that of OpenAI's errors (`message`, `type`, `param`, `code`), so that its clients show the message, with
`field` and `limit` beside it. tests/llmproxy/test_llmproxy_gateway_bad_input.py goes through them.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from llmproxy.errors import (
    Aborted,
    Closed,
    DuplicateRequest,
    Interrupted,
    InvalidRequest,
    LLMProxyError,
    NoWorker,
    RetriesExhausted,
    UpdateFailed,
    WorkerLost,
    WrongState,
)

_STATUSES: list[tuple[type[LLMProxyError], int]] = [
    (DuplicateRequest, 409),
    (InvalidRequest, 400),
    (NoWorker, 503),
    (RetriesExhausted, 502),
    (WorkerLost, 502),
    (UpdateFailed, 502),
    (Aborted, 409),
    (Interrupted, 409),
    (WrongState, 409),
    (Closed, 503),
]

REASONS = {
    200: b"OK",
    400: b"Bad Request",
    401: b"Unauthorized",
    403: b"Forbidden",
    404: b"Not Found",
    405: b"Method Not Allowed",
    408: b"Request Timeout",
    409: b"Conflict",
    413: b"Content Too Large",
    422: b"Unprocessable Content",
    429: b"Too Many Requests",
    431: b"Request Header Fields Too Large",
    500: b"Internal Server Error",
    502: b"Bad Gateway",
    503: b"Service Unavailable",
    504: b"Gateway Timeout",
    505: b"HTTP Version Not Supported",
}


class Refusal(Exception):
    """Raised when the gateway answers a request itself, with an error."""

    def __init__(self, status: int, type: str, message: str, field: str = "", limit: str = "") -> None:
        super().__init__(status, type, message, field, limit)
        self.status = status
        self.type = type
        self.message = message
        self.field = field
        self.limit = limit

    def body(self) -> bytes:
        return msgspec.json.encode(
            {
                "error": {
                    "message": self.message,
                    "type": self.type,
                    "param": self.field or None,
                    "code": self.status,
                    "field": self.field or None,
                    "limit": self.limit or None,
                }
            }
        )


def refusal(error: Exception) -> Refusal:
    """How an error of this package is told to a caller."""
    if isinstance(error, Refusal):
        return error
    status = next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)
    field = error.field if isinstance(error, InvalidRequest) else ""
    limit = error.limit if isinstance(error, InvalidRequest) else ""
    return Refusal(status, type(error).__name__, str(error) or "the gateway failed", field, limit)


class Response(Struct):
    """A whole answer of the gateway's own."""

    status: int
    body: bytes
    content_type: bytes = b"application/json"

    def encode(self, *, close: bool, bare: bool = False) -> bytes:
        """`bare`: the head alone, which is what HEAD asks for."""
        return b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n%b\r\n%b" % (
            self.status,
            REASONS.get(self.status, b"Error"),
            self.content_type,
            len(self.body),
            b"connection: close\r\n" if close else b"",
            b"" if bare else self.body,
        )


def json_response(value: object, status: int = 200) -> Response:
    return Response(status, msgspec.json.encode(value))
