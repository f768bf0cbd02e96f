"""A store in the shared memory of one host, at the speed of a copy.

Fresh pages cost more than the copy into them. So large objects are copied through mappings that are kept, and the
files of deleted objects are kept as spares for the next objects of their size. A reader that is still copying from
such a file gets bytes of the new object: its checksum finds that, as it finds any other change
(`test_weightsync_shm.py`).
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from weightsync.errors import BadConfig, Missing, StoreError, StoreFull, StoreUnavailable
from weightsync.files import FileStore
from weightsync.tensors import Bytes

__all__ = ["SharedMemoryStore", "shm_folder"]

# Below this an object is written and read like any file.
_LARGE_BYTES = 1 << 20


def shm_folder(name: str) -> Path:
    return Path(f"/dev/shm/weightsync-{name}")


class SharedMemoryStore(FileStore):
    """A named folder of /dev/shm: every process of this host that opens the name sees the same versions.

    Every process of this user, that is. It survives its processes; `unlink()` frees the memory.
    """

    def __init__(self, name: str) -> None:
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,100}", name):
            raise BadConfig(f"shared memory store name {name!r}: use letters, digits, '.', '_' and '-'")
        super().__init__(shm_folder(name), durable=False, mode=0o700)
        self._mappings = _Mappings()

    async def close(self) -> None:
        self._mappings.clear()

    def unlink(self) -> None:
        """Remove the store and all that is in it."""
        self._mappings.clear()
        for path in self.folder.iterdir():
            path.unlink(missing_ok=True)
        self.folder.rmdir()

    def _put(self, key: str, parts: Sequence[Bytes]) -> None:
        size = sum(part.size for part in parts)
        if size < _LARGE_BYTES:
            return super()._put(key, parts)
        if self._path(key).exists():
            return
        hidden = self._path(f".{key}.part")
        if not self._take_spare(size, hidden):
            self._allocate(key, size, hidden)
        fd = os.open(hidden, os.O_RDWR | os.O_CLOEXEC)
        memory, end = self._mappings.of(fd, size), 0
        for part in parts:
            memory[end : end + part.size] = part
            end += part.size
        os.rename(hidden, self._path(key))

    def _allocate(self, key: str, size: int, hidden: os.PathLike[str]) -> None:
        """All pages at once: to run out of them while copying through a mapping would be a signal, not an error."""
        try:
            fd = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, size)
            finally:
                os.close(fd)
        except OSError as error:
            with suppress(FileNotFoundError):
                os.unlink(hidden)
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise StoreFull(f"no room for {key!r} of {size} bytes in {self.folder}: enlarge /dev/shm") from error
            raise StoreUnavailable(f"cannot write {key!r} to {self.folder}: {error.strerror}") from error

    def _take_spare(self, size: int, hidden: os.PathLike[str]) -> bool:
        for name in self._spares(size):
            try:
                os.rename(self._path(name), hidden)
            except FileNotFoundError:
                continue
            return True
        return False

    def _spares(self, size: int | None = None) -> list[str]:
        start = ".spare." if size is None else f".spare.{size}."
        return [name for name in os.listdir(self.folder) if name.startswith(start)]

    def _get_into(self, key: str, offset: int, buffer: Bytes) -> None:
        if buffer.size < _LARGE_BYTES:
            return super()._get_into(key, offset, buffer)
        try:
            fd = os.open(self._path(key), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            raise Missing(f"{key!r} is not in {self.folder}") from None
        except OSError as error:
            raise self._unreadable(key, error) from error
        size = os.fstat(fd).st_size
        if size < offset + buffer.size:
            os.close(fd)
            raise StoreError(
                f"{key!r} in {self.folder} ends {offset + buffer.size - size} bytes early: publish it again"
            )
        np.copyto(buffer, self._mappings.of(fd, size)[offset : offset + buffer.size])

    def _delete(self, keys: Sequence[str]) -> None:
        """Large objects become spares, in place of those that nobody wanted since other large objects went."""
        sizes = {key: size for key in keys if (size := self._size(key)) >= _LARGE_BYTES}
        for name in self._spares() if sizes else ():
            self._path(name).unlink(missing_ok=True)
        for key, size in sizes.items():
            with suppress(FileNotFoundError):  # a publisher that took over deletes the same
                os.rename(self._path(key), self._path(f".spare.{size}.{secrets.token_hex(4)}"))
        super()._delete(keys)

    def _size(self, key: str) -> int:
        try:
            return os.stat(self._path(key)).st_size
        except FileNotFoundError:
            return 0


class _Mappings:
    """Mappings of files by inode; a file that is gone is unmapped when the next one is mapped."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[int, Bytes]] = {}
        self._lock = threading.Lock()

    def of(self, fd: int, size: int) -> Bytes:
        """The whole file; takes over the descriptor."""
        inode = os.fstat(fd).st_ino
        with self._lock:
            if inode in self._found:
                os.close(fd)
                return self._found[inode][1]
            self._drop(lambda known: os.fstat(known).st_nlink == 0)
            memory = mmap.mmap(fd, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
            found = np.frombuffer(memory, np.uint8)
            self._found[inode] = (fd, found)
            return found

    def clear(self) -> None:
        with self._lock:
            self._drop(lambda _: True)

    def _drop(self, gone: Callable[[int], bool]) -> None:
        for inode, (fd, _) in list(self._found.items()):
            if gone(fd):
                os.close(fd)
                del self._found[inode]
