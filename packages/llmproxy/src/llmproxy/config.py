"""The proxy's bounds, and what it reports of itself."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from .worker import Role


class ProxyConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds of the proxy; seconds where a time is meant."""

    on_failure: Literal["fence", "fail"] = "fence"
    """A worker fails an update: fence it and go on, or fail the update and stay suspended."""
    attempts: int = 4
    """Workers that one request may lose before it fails."""
    patience: float = 60.0
    """How long a request waits for a worker to serve before NoWorker, while the gate is open."""
    short_prefill: int = 2048
    """Where prefill and decode are apart: the most new tokens that a decode worker computes itself, once the prefill
    worker is seen to have lost the rest of their context."""
    answer: float = 30.0
    """How long a worker may take to answer pause, resume, interrupt or probe."""
    update: float = 600.0
    """How long a worker may take to load a version."""
    watch: float = 10.0
    """How often a worker with requests out is probed; one that takes longer than `answer` loses them."""
    probe_first: float = 0.1
    """Delay of the first probe of a fenced worker; each further one waits twice as long, and so does the first one
    of each further fencing, until the worker finished a request."""
    probe_every: float = 10.0
    """The longest delay between probes of a fenced worker."""


class WorkerStats(Struct, frozen=True):
    """One worker as the proxy sees it.

    `load` is what routing goes by, `charged` what this proxy's requests there may come to, both in tokens; `fenced`
    says why it gets no traffic.
    """

    id: str
    hardware: str
    version: int | None
    load: int
    running: int
    fenced: str
    role: Role = "both"
    charged: int = 0


class ProxyStats(Struct, frozen=True):
    """A snapshot.

    `requests` are the ledger's counts, `lost` the requests whose worker was lost under them, `unsplit` those that a
    decode worker prefilled itself, as no prefill worker served, `local` those that it prefilled as it held their
    prefix.
    """

    version: int
    suspended: bool
    requests: dict[str, int]
    lost: int
    router: dict[str, int]
    workers: list[WorkerStats]
    prefill_router: dict[str, int] = {}
    unsplit: int = 0
    local: int = 0
