"""Ends an engine's processes when their owner is gone, however it went.

An engine lives in child processes, and a killed owner cannot stop them. So the owner starts this small process
beside the engine and holds the other end of its standard input, which the kernel closes when the owner dies. Then
every process that inherited the engine's mark in its environment is killed. Closing the input on purpose does the
same for what an orderly shutdown left behind. (tests/llmproxy/test_llmproxy_reaper.py)
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

MARK = "LLMPROXY_ENGINE"


def start(mark: str) -> subprocess.Popen[bytes]:
    """Watch over processes marked `MARK=mark`; close `stdin` of the answer to have them killed."""
    command = [sys.executable, "-I", "-S", __file__, mark, str(os.getpid())]
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    return subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True)


def _marked(mark: str, owner: int) -> Iterator[int]:
    wanted = f"{MARK}={mark}".encode()
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) in (owner, os.getpid()):
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if wanted in file.read().split(b"\0"):
                    yield int(name)
        except OSError:
            continue  # another user's process, or one that ended


def main(mark: str, owner: int) -> None:
    sys.stdin.buffer.read()
    while pids := list(_marked(mark, owner)):  # again, in case one was just being started
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
