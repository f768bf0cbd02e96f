"""How a function server runs. Seconds are those of its loop."""

from __future__ import annotations

import ipaddress
import os

import msgspec

from rollart.serverless.errors import BadFunction


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """`function` is MODULE:FUNCTION."""

    function: str
    host: str = "127.0.0.1"
    port: int = 8080
    token: str = ""
    """Callers must give it as a bearer token; needed to listen elsewhere than on loopback."""
    workers: int = msgspec.field(default_factory=lambda: os.cpu_count() or 1)
    """Processes at most; each serves one call at a time."""
    least: int = 0
    """Processes that are kept when there is nothing to do."""
    queue: int = 64
    """Calls that may wait for a process; one more is answered 429."""
    timeout: float = 60.0
    """Of one call, from its start in a process."""
    start_timeout: float = 60.0
    idle: float = 60.0
    """A process that had nothing to do for so long ends."""
    drain: float = 30.0
    """How long calls under way may go on when the server ends."""
    largest_body: int = 32 << 20
    remembered: int = 1024
    """Answers that are kept for calls that come again under their idempotency key."""

    def __post_init__(self) -> None:
        module, found, name = self.function.partition(":")
        if not (module and found and name):
            raise BadFunction(f"function={self.function!r} must be MODULE:FUNCTION, e.g. mine.rewards:score")
        for field, least in (("workers", 1), ("least", 0), ("queue", 0), ("remembered", 0), ("largest_body", 1)):
            if getattr(self, field) < least:
                raise BadFunction(f"{field}={getattr(self, field)} must be at least {least}")
        for field in ("timeout", "start_timeout", "idle", "drain"):
            if not getattr(self, field) > 0:
                raise BadFunction(f"{field}={getattr(self, field)} must be positive")
        if not 0 <= self.port <= 65535:
            raise BadFunction(f"port={self.port} must be within 0..65535; 0 takes a free one")
        if self.least > self.workers:
            raise BadFunction(f"least={self.least} must be at most workers={self.workers}")
        if not self.token and not _is_loopback(self.host):
            raise BadFunction(
                f"host={self.host!r} can be reached from elsewhere: give a token, or listen on 127.0.0.1"
            )

    @property
    def name(self) -> str:
        """The function's own name, by which /function/NAME calls it."""
        return self.function.rpartition(":")[2]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
