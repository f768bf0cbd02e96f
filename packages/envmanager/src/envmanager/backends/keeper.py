"""The parent of one worker process: reaps it, with everything that it ever started. Run as a script; standard
library only.

Invariants:
- when this process is told to end (SIGTERM, also at its own parent's death) or its worker ends, no descendant of
  the worker is left, not even one that made itself a daemon: orphans fall to this process, a subreaper
  (test_envmanager_subprocess.py::test_children_go_with_their_environment);
- what the worker prints is read and forgotten but for its end, so printing can neither block nor fill anything
  (test_envmanager_subprocess.py::test_printing_without_end).

Descriptors: 0 takes requests and 1 gives replies, both the worker's business; on 2 stands, at the end, how the
worker ended.
"""

import contextlib
import ctypes
import os
import resource
import selectors
import signal
import sys
from typing import NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
TAIL_BYTES = 2048


def children(pid: int) -> list[int]:
    """The direct children of a process of this user."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as listing:
                found += map(int, listing.read().split())
    return found


def adopt_orphans() -> None:
    """Makes this process the parent of its descendants whose parents end."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with(parent: int) -> None:
    """SIGTERM when the parent ends, or now, if it has."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def reap_all() -> None:
    """Kills child after child; those of a killed one become children here, until there are none."""
    while True:
        for pid in children(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def start_worker(memory: int, output: int) -> int:
    """Forks the worker: requests and replies on new descriptors, its standard output and error into `output`."""
    pid = os.fork()
    if pid:
        return pid
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    requests, replies, nothing = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory:
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    from envmanager.backends.worker import serve

    serve(requests, replies)
    os._exit(0)


def watch(worker: int, output: int, wakeup: int) -> tuple[int | None, bytes]:
    """Reads the output until the worker ends (its wait status) or SIGTERM comes (None)."""
    tail = b""
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        selector.register(wakeup, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == output:
                    tail = (tail + os.read(output, 1 << 16))[-TAIL_BYTES:]
                elif signal.SIGTERM in os.read(wakeup, 64):
                    return None, tail
            pid, status = os.waitpid(worker, os.WNOHANG)
            if pid:
                return status, tail


def drained(output: int, tail: bytes) -> bytes:
    """The tail with what is still in the pipe."""
    os.set_blocking(output, False)
    with contextlib.suppress(BlockingIOError):
        while piece := os.read(output, 1 << 16):
            tail = (tail + piece)[-TAIL_BYTES:]
    return tail


def obituary(status: int, tail: bytes) -> str:
    code = os.waitstatus_to_exitcode(status)
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    said = tail.decode(errors="replace").strip()
    return f"{how}; its last output: {said}" if said else how


def main(parent: int, memory: int) -> NoReturn:
    adopt_orphans()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's interrupt is for the loop, which ends this process
    end_with(parent)
    output, into = os.pipe()
    worker = start_worker(memory, into)
    os.close(into)
    os.close(0)
    status, tail = watch(worker, output, reading)
    reap_all()
    if status is not None:
        os.write(2, obituary(status, drained(output, tail)).encode())
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
