"""A store made of files, in a folder of any file system.

An object is written under a hidden name and then renamed, so that it appears whole or not at all, and what a
killed writer left is removed together with its key (`test_weightsync_faults.py`). Writers of one key wait for each
other by a lock on the hidden file, which the kernel takes back from the dead
(`test_weightsync_stores.py::test_writers_of_one_key_wait_for_each_other`).
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from weightsync.blocking import in_thread
from weightsync.errors import Missing, StoreError, StoreFull, StoreUnavailable
from weightsync.notify import FolderWatch
from weightsync.tensors import Bytes

__all__ = ["FileStore"]

# The most buffers that one writev takes (IOV_MAX on Linux).
_MAX_PARTS = 1024


class FileStore:
    """A folder, local or mounted. `durable` survives a host crash; `poll` is for folders that others mount too;
    `mode` of a folder that is made here, less the umask."""

    def __init__(
        self, folder: str | os.PathLike[str], *, durable: bool = True, poll: float = 5.0, mode: int = 0o777
    ) -> None:
        self.folder = Path(folder)
        self._durable = durable
        self._poll = poll
        try:
            self.folder.mkdir(mode, parents=True, exist_ok=True)
        except OSError as error:
            raise StoreUnavailable(f"cannot make the store's folder {folder}: {error.strerror}") from error

    async def put(self, key: str, parts: Sequence[Bytes]) -> None:
        await in_thread(self._put, key, parts)

    async def get_into(self, key: str, offset: int, buffer: Bytes) -> None:
        await in_thread(self._get_into, key, offset, buffer)

    async def get(self, key: str) -> bytes | None:
        return await in_thread(self._get, key)

    async def present(self, keys: Sequence[str]) -> list[bool]:
        return await in_thread(lambda: [self._path(key).exists() for key in keys])

    async def replace(self, key: str, value: bytes) -> None:
        await in_thread(self._write, key, [value], False)

    async def read(self, key: str) -> bytes | None:
        return await in_thread(self._get, key)

    async def changed(self, key: str, seen: bytes | None) -> bytes:
        watch = FolderWatch(self.folder)
        try:
            while (value := await in_thread(self._get, key)) in (None, seen):
                await watch.moved(self._poll)
        finally:
            watch.close()
        return value

    async def delete(self, keys: Sequence[str]) -> None:
        await in_thread(self._delete, keys)

    async def close(self) -> None:
        pass

    def _path(self, key: str) -> Path:
        return self.folder / key

    def _put(self, key: str, parts: Sequence[Bytes]) -> None:
        if not self._path(key).exists():
            self._write(key, [part.data for part in parts if part.size], True)

    def _write(self, key: str, parts: Sequence[bytes | memoryview], once: bool) -> None:
        """Write the value; with `once`, an object that exists stays as it is."""
        hidden = self._path(f".{key}.part")
        size = sum(len(part) for part in parts)
        try:
            with _locked(hidden) as file:
                if once and self._path(key).exists():
                    hidden.unlink()
                    return
                file.truncate()
                for batch in _batches(parts):
                    _write_all(file.fileno(), batch)
                if self._durable:
                    os.fsync(file.fileno())
                os.rename(hidden, self._path(key))
        except OSError as error:
            with suppress(OSError):  # the first error is what matters; where nothing can be written, nothing can go
                hidden.unlink(missing_ok=True)
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise StoreFull(f"no room for {key!r} of {size} bytes in {self.folder}: enlarge it") from error
            raise StoreUnavailable(f"cannot write {key!r} to {self.folder}: {error.strerror}") from error

    def _get_into(self, key: str, offset: int, buffer: Bytes) -> None:
        view, done = buffer.data, 0
        try:
            fd = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise Missing(f"{key!r} is not in {self.folder}") from None
        except OSError as error:
            raise self._unreadable(key, error) from error
        try:
            while done < len(view):
                count = os.preadv(fd, [view[done:]], offset + done)
                if not count:
                    raise StoreError(
                        f"{key!r} in {self.folder} ends {len(view) - done} bytes early: publish it again"
                    )
                done += count
        except OSError as error:
            raise self._unreadable(key, error) from error
        finally:
            os.close(fd)

    def _get(self, key: str) -> bytes | None:
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._unreadable(key, error) from error

    def _unreadable(self, key: str, error: OSError) -> StoreUnavailable:
        return StoreUnavailable(f"cannot read {key!r} in {self.folder}: {error.strerror}")

    def _delete(self, keys: Sequence[str]) -> None:
        try:
            for key in keys:
                self._path(key).unlink(missing_ok=True)
                self._path(f".{key}.part").unlink(missing_ok=True)
        except OSError as error:
            raise StoreUnavailable(f"cannot delete {key!r} in {self.folder}: {error.strerror}") from error


@contextmanager
def _locked(path: Path) -> Iterator[io.FileIO]:
    """The file of this name, locked; made if there is none."""
    while True:
        with open(path, "ab", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            # Whoever held the lock has renamed the file by now, unless it died.
            if _is_file_of(file, path):
                file.seek(0)
                yield file
                return


def _is_file_of(file: io.FileIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _batches(parts: Sequence[bytes | memoryview]) -> Iterator[list[memoryview]]:
    for first in range(0, len(parts), _MAX_PARTS):
        yield [memoryview(part) for part in parts[first : first + _MAX_PARTS]]


def _write_all(fd: int, parts: list[memoryview]) -> None:
    while parts:
        written = os.writev(fd, parts)
        while parts and written >= len(parts[0]):
            written -= len(parts.pop(0))
        if parts:
            parts[0] = parts[0][written:]
