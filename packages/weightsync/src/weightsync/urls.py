"""Stores by URL, so that a configuration names one and every process opens the same."""

from __future__ import annotations

from urllib.parse import urlsplit

from weightsync.errors import BadConfig
from weightsync.files import FileStore
from weightsync.shm import SharedMemoryStore
from weightsync.store import MemoryStore, Store

__all__ = ["open_store"]


def open_store(url: str) -> Store:
    """`shm:NAME`, `file:DIR`, `mooncake://HOST:PORT[/NAMESPACE]`, or `memory:` (a new one, in this process only)."""
    scheme, _, rest = url.partition(":")
    if scheme == "shm":
        return SharedMemoryStore(rest)
    if scheme == "file" and rest:
        return FileStore(urlsplit(url).path if rest.startswith("//") else rest)
    if scheme == "memory" and not rest:
        return MemoryStore()
    if scheme == "mooncake":
        parts = urlsplit(url)
        host, _, port = parts.netloc.rpartition(":")
        if host and port.isdecimal() and 0 < int(port) < 1 << 16:
            from weightsync.mooncake import MooncakeStore

            return MooncakeStore(parts.netloc, parts.path.strip("/") or "weights")
    raise BadConfig(f"store URL {url!r}: use shm:NAME, file:DIR, mooncake://HOST:PORT[/NAMESPACE] or memory:")
