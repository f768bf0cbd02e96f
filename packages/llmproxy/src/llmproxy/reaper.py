"""Ends an engine's processes when their owner is gone, however it went.

An engine lives in child processes, and a killed owner cannot stop them. So the owner starts this small process
beside the engine and holds the other end of its standard input, which the kernel closes when the owner dies. Then
every process that inherited the engine's mark in its environment is killed, and every semaphore whose name bears the
mark is removed: a killed process leaves its own. Closing the input on purpose does the same for what an orderly
shutdown left behind, and so does SIGTERM, by which a whole tree of processes is ended.
(tests/llmproxy/test_llmproxy_reaper.py)

A child of the process that was started does it: Ray, for one, kills the children of a worker that ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import current_process

MARK = "LLMPROXY_ENGINE"
_SEMAPHORES = "/dev/shm"


def start(mark: str) -> subprocess.Popen[bytes]:
    """Watch over processes marked `MARK=mark`; close `stdin` of the answer to have them killed."""
    command = [sys.executable, "-I", "-S", __file__, mark, str(os.getpid())]
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    return subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True)


@contextmanager
def marked_semaphores(mark: str) -> Iterator[None]:
    """Semaphores of processes that are started within bear the mark: multiprocessing hands its prefix on to them."""
    config: dict[str, str] = current_process()._config  # type: ignore[attr-defined]
    before = config["semprefix"]
    config["semprefix"] = f"/mp-{mark}"
    try:
        yield
    finally:
        config["semprefix"] = before


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
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if child := os.fork():
        os.close(sys.stdin.fileno())
        os.waitpid(child, 0)
    else:
        watch(mark, owner)


def watch(mark: str, owner: int) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    with suppress(SystemExit):
        sys.stdin.buffer.read()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while pids := list(_marked(mark, owner)):  # again, in case one was just being started
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    for name in os.listdir(_SEMAPHORES):
        if name.startswith(f"sem.mp-{mark}-"):
            os.unlink(os.path.join(_SEMAPHORES, name))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
