"""The gateway's bounds."""

from __future__ import annotations

from msgspec import Struct


class GatewayConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes in bytes, times in seconds."""

    api_key: str = ""
    """Asked of every caller but for /health; empty asks nobody."""
    admin_token: str = ""
    """Asked of callers of /admin; empty lets callers on this host in, and nobody else."""
    max_body: int = 64 << 20
    """The longest request body; a longer one is refused before it is read."""
    max_buffered: int = 1 << 30
    """All request bodies that are held at one time."""
    max_head: int = 64 << 10
    max_connections: int = 4096
    head_timeout: float = 30.0
    """From a request's first byte to the end of its headers."""
    body_timeout: float = 300.0
    idle_timeout: float = 75.0
    """How long a connection may stay open between requests."""
    stall_timeout: float = 60.0
    """How long a client may not take what is written to it."""
    request_timeout: float = 3600.0
    """From a request's arrival to the end of its answer, time spent suspended included."""
    attempts: int = 4
    """Workers that one request may lose before it fails."""
    breaker: int = 5
    """Server errors in a row, over all requests, after which a worker is fenced."""
    record: bool = False
    """Keep what each trajectory's requests and answers were."""
    record_count: int = 10_000
    """Trajectories kept."""
    record_bytes: int = 1 << 30
    record_age: float = 86_400.0
