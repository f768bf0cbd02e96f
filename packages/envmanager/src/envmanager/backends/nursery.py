"""Forks keepers and their workers from one process that has imported everything once: a worker costs a fork, not
a start of Python.

Invariants:
- the target is imported here only if that leaves a single thread, since threads do not survive a fork; otherwise,
  or where the import fails, each worker imports it itself
  (test_envmanager_subprocess.py::test_a_target_with_threads_is_not_forked);
- this process ends with its pool: when the control socket is closed, or, while an import goes on that may never end,
  when the pool's process dies
  (test_envmanager_subprocess.py::test_environments_do_not_outlive_a_killed_parent).

Run as `python -P -m envmanager.backends.nursery CONTROL TARGET PARENT`; without TARGET nothing of the user's is
imported.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys
from functools import partial

import msgspec

from envmanager.backends.keeper import keep
from envmanager.backends.sandbox import serve_inside
from envmanager.backends.wire import Order
from envmanager.backends.worker import serve
from envmanager.naming import named

PR_SET_PDEATHSIG = 1
FDS = 2  # the worker's socket and the lifeline, which become the keeper's 0 and 1


def preload(target: str, parent: int) -> bool:
    """Imports the target; says whether forking is still safe."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    with contextlib.suppress(Exception, SystemExit):  # each worker will meet the same error, and report it
        named(target)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0)
    return len(os.listdir("/proc/self/task")) == 1


def main(control: int, target: str, parent: int) -> None:
    if target and not preload(target, parent):
        os.set_inheritable(control, True)
        again = ["-P", "-m", "envmanager.backends.nursery", str(control), "", str(parent)]
        os.execv(sys.executable, [sys.executable, *again])
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # a terminal's interrupt is for the pool's process, which ends this one
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers tell of their ends by their pipes
    orders = socket.socket(fileno=control)
    while True:
        received, fds, _, _ = socket.recv_fds(orders, 1 << 16, FDS)
        if not received:
            return
        order = msgspec.msgpack.decode(received, type=Order)
        if os.fork() == 0:
            orders.close()
            for number, fd in enumerate(fds):
                os.dup2(fd, number)
                os.close(fd)
            keep(serve if order.sandbox is None else partial(serve_inside, also=order.sandbox), order.memory)
        for fd in fds:
            os.close(fd)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
