"""Host memory for one whole model, in the flat layout of its plan.

It is an anonymous memory file: other processes of this user map it by `path` (so an engine in a child process
loads from it without another copy), and the kernel frees it when the last of them is gone, however they end.
"""

from __future__ import annotations

import mmap
import os

import numpy as np

from weightsync.tensors import Bytes

__all__ = ["Staging"]


class Staging:
    """`array` is the memory; `content[i]` is the checksum of what bucket `i` holds, None while it changes."""

    def __init__(self, size: int, buckets: int) -> None:
        self._fd = os.memfd_create("weightsync", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, max(size, 1))
        self._map = mmap.mmap(self._fd, max(size, 1))
        self.array: Bytes = np.frombuffer(self._map, np.uint8, count=size)
        self.content: list[str | None] = [None] * buckets

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        """Close the file; the memory lives on for as long as `array` or another mapping of it does."""
        os.close(self._fd)
