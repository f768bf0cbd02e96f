"""Waiting for changes in a folder by inotify, through the C library that is loaded anyway.

It sees what processes on this host do. On a mounted object store or network folder, changes made elsewhere
raise no event: `FileStore(poll=...)` looks again after that many seconds.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from pathlib import Path

from weightsync.errors import StoreUnavailable

__all__ = ["FolderWatch"]

_IN_MOVED_TO = 0x80
_LIBC = ctypes.CDLL(None, use_errno=True)


class FolderWatch:
    """Files moved into a folder, from the moment it is made until `close`."""

    def __init__(self, folder: Path) -> None:
        self._fd: int = _LIBC.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise StoreUnavailable(
                f"cannot watch {folder}: {os.strerror(ctypes.get_errno())}; "
                "raise fs.inotify.max_user_instances, or the limit of open files"
            )
        if _LIBC.inotify_add_watch(self._fd, os.fsencode(folder), _IN_MOVED_TO) < 0:
            why = os.strerror(ctypes.get_errno())
            os.close(self._fd)
            raise StoreUnavailable(f"cannot watch {folder}: {why}")

    async def moved(self, within: float) -> None:
        """Return after the next event, or after `within` seconds."""
        loop = asyncio.get_running_loop()
        event = asyncio.Event()
        loop.add_reader(self._fd, event.set)
        try:
            async with asyncio.timeout(within):
                await event.wait()
            os.read(self._fd, 1 << 16)
        except TimeoutError:
            pass
        finally:
            loop.remove_reader(self._fd)

    def close(self) -> None:
        os.close(self._fd)
