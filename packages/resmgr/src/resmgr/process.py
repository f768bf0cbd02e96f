"""Which process a session belongs to, so that one on the same machine can tell at once that it is dead.

`is_dead` never says so wrongly: it answers only for processes of the same boot and the same process namespace, and a
pid that was used again is told apart by its start time (tests: `test_resmgr_embedded.py`).
"""

import hashlib
import os
from pathlib import Path


def identity() -> str:
    """Of this process, as MACHINE.PID.START; empty where the system does not tell."""
    start = _start_time(os.getpid())
    return f"{_machine()}.{os.getpid()}.{start}" if start else ""


def is_dead(other: str) -> bool:
    machine, _, rest = other.partition(".")
    pid, _, start = rest.partition(".")
    return machine == _machine() and pid.isdigit() and _start_time(int(pid)) != start


def _machine() -> str:
    """The same for processes that see each other's pids, within one boot."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/pid")
    if not (boot.exists() and namespace.is_symlink()):
        return "unknown"
    return hashlib.sha256(f"{boot.read_text()}{namespace.readlink()}".encode()).hexdigest()[:8]


def _start_time(pid: int) -> str:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    state, *fields = stat.rpartition(")")[2].split()
    return "" if state in "ZX" else fields[18]
