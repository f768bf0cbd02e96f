"""Forks servers of environments for the node agent, so that a pod costs a fork and not a start of Python.

Run as `python -m tests.envmanager.zygote CONTROL`: each order is JSON `{"argv", "environ"}` with a descriptor, on
which the process group's id and, when the server has ended, its exit code are written.
"""

import json
import os
import signal
import socket
import sys
from typing import Any

from tests.envmanager import misbehaving

from envmanager.backends import server
from envmanager.cli import main


def serve(order: dict[str, Any], report: int) -> None:
    """In the fork: the leader of the group waits for the server, its child."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.write(report, f"{os.getpid()}\n".encode())
    child = os.fork()
    if child == 0:
        os.close(report)
        os.environ.update(order["environ"])
        os._exit(main(order["argv"]))
    _, status = os.waitpid(child, 0)
    os.write(report, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


if __name__ == "__main__":
    assert server and misbehaving  # imported once, for all forks
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    orders = socket.socket(fileno=int(sys.argv[1]))
    while (received := socket.recv_fds(orders, 1 << 16, 1))[0]:
        if os.fork() == 0:
            orders.close()
            serve(json.loads(received[0]), received[1][0])
        os.close(received[1][0])
