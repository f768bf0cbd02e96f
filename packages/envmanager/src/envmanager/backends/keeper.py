"""The parent of one worker process: reaps it, with everything that it ever started. Standard library only.

Invariants:
- when the lifeline breaks (its other end is closed, by whoever asked for the worker or by that one's death) or
  the worker ends, no descendant of the worker is left, not even one that made itself a daemon: orphans fall to
  this process, a subreaper (test_envmanager_subprocess.py::test_children_go_with_their_environment);
- what the worker prints is read and forgotten but for its end, so printing can neither block nor fill anything
  (test_envmanager_subprocess.py::test_printing_without_end).

Descriptors: 0 is the worker's socket, on which it is asked and replies. 1 is the lifeline: on it stand this
process's id at the start and how the worker ended at the end; its far end's closing is the order to end.
"""

import contextlib
import ctypes
import os
import resource
import selectors
import signal
from collections.abc import Callable
from typing import NoReturn

PR_SET_CHILD_SUBREAPER = 36
TALK, LIFELINE = 0, 1
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


def start_worker(serve: Callable[[int], None], memory: int, output: int) -> int:
    """Forks the worker: its socket on a new descriptor, its standard output and error into `output`."""
    pid = os.fork()
    if pid:
        return pid
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    talk, nothing = os.dup(TALK), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory:
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    serve(talk)
    os._exit(0)


def watch(worker: int, output: int, wakeup: int) -> tuple[int | None, bytes]:
    """Reads the output until the worker ends (its wait status) or the lifeline breaks (None)."""
    tail = b""
    with selectors.DefaultSelector() as selector:
        for fd in (output, wakeup, LIFELINE):
            selector.register(fd, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == LIFELINE:
                    return None, tail
                piece = os.read(key.fd, 1 << 16)
                if key.fd == output:
                    tail = (tail + piece)[-TAIL_BYTES:]
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


def keep(serve: Callable[[int], None], memory: int) -> NoReturn:
    """Starts a worker that answers with `serve`, and ends with it."""
    os.setsid()
    adopt_orphans()
    try:
        os.write(LIFELINE, f"{os.getpid()}\n".encode())
    except BrokenPipeError:  # whoever asked for it has given up
        os._exit(0)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    output, into = os.pipe()
    worker = start_worker(serve, memory, into)
    os.close(into)
    os.close(TALK)
    status, tail = watch(worker, output, reading)
    reap_all()
    if status is not None:
        with contextlib.suppress(OSError):  # the far end may be gone meanwhile
            os.write(LIFELINE, obituary(status, drained(output, tail)).encode())
    os._exit(0)
