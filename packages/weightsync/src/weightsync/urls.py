"""Stores by URL, so that a configuration names one and every process opens the same."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

from weightsync.errors import BadConfig
from weightsync.files import FileStore
from weightsync.shm import SharedMemoryStore, shm_folder
from weightsync.store import MemoryStore, Store

__all__ = ["folder_of", "open_store"]


def open_store(url: str) -> Store:
    """`shm:NAME`, `file:DIR`, `mooncake://HOST:PORT[/NAMESPACE]`, or `memory:` (a new one, in this process only)."""
    if isinstance(url, str) and "\0" not in url and (store := _store(url)) is not None:
        return store
    raise BadConfig(f"store URL {url!r}: use shm:NAME, file:DIR, mooncake://HOST:PORT[/NAMESPACE] or memory:")


def folder_of(url: str) -> Path | None:
    """The folder of a `file:` or `shm:` URL, whether or not it exists."""
    scheme, _, rest = url.partition(":")
    if scheme == "shm" and rest:
        return shm_folder(rest)
    if scheme == "file" and rest:
        return Path(urlsplit(url).path if rest.startswith("//") else rest)
    return None


def _store(url: str) -> Store | None:
    scheme, _, rest = url.partition(":")
    if scheme == "shm":
        return SharedMemoryStore(rest)
    if scheme == "file" and (folder := folder_of(url)) is not None:
        return FileStore(folder)
    if scheme == "memory" and not rest:
        return MemoryStore()
    if scheme == "mooncake" and (found := re.fullmatch(r"//(\[[^]/?#]+\]|[^][:/?#]+):(\d+)(/[^?#]*)?", rest)):
        host, port, path = found.groups()
        if 0 < int(port) < 1 << 16:
            from weightsync.mooncake import MooncakeStore

            return MooncakeStore(f"{host}:{port}", (path or "").strip("/") or "weights")
    return None
