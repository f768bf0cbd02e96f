"""The process that owns everything a Ray session starts, so that nothing outlives the driver.

It runs as a script of the standard library only, in a session of its own (a terminal's Ctrl-C does not reach it or
its children), and adopts orphans (PR_SET_CHILD_SUBREAPER), so that its descendants are exactly what was started.

Invariants (tests/rollart/test_rollart_distributed_session.py):
- when the driver closes its end, or dies in any way, every descendant is ended within seconds: first by SIGTERM, what
  is left after `PATIENCE` by SIGKILL (test_nothing_outlives_a_killed_driver, test_stop_leaves_nothing);
- the same, driver included, where a process dies that Ray cannot do without, after a line that names it
  (test_what_ray_cannot_do_without_is_named_when_it_dies);
- the folders are removed after that: the session's own, and what else goes with the driver (same tests).

Usage: keeper.py DRIVER_PID FOLDER[:FOLDER...] COMMAND...; prints `ready` when the command has ended well, `failed`
otherwise, and waits for the end of its standard input or of the driver.
"""

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time

PATIENCE = 1.0
PR_SET_CHILD_SUBREAPER = 36
VITAL = ("raylet", "gcs_server")


def descendants(root: int) -> list[int]:
    """The living processes below `root`, parents first."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (parent := _parent(entry)):
            children.setdefault(parent, []).append(int(entry))
    found = list(children.get(root, ()))
    for pid in found:
        found += children.get(pid, ())
    return found


def _parent(pid: str) -> int:
    """The parent of a process, or 0 when it has ended."""
    fields = _stat(pid).rpartition(")")[2].split()
    return 0 if not fields or fields[0] in "ZX" else int(fields[1])


def _name(pid: int) -> str:
    return _stat(pid).partition("(")[2].rpartition(")")[0]


def _stat(pid: int | str) -> str:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return stat.read()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def sweep(root: int) -> None:
    """End every descendant of `root`."""
    for number, patience in ((signal.SIGTERM, PATIENCE), (signal.SIGKILL, 10 * PATIENCE)):
        told: set[int] = set()
        deadline = time.monotonic() + patience
        while (alive := descendants(root)) and time.monotonic() < deadline:
            for pid in set(alive) - told:
                _kill(pid, number)
            told |= set(alive)
            reap()
            time.sleep(0.02)


def _kill(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def reap(*_: object) -> None:
    """Take the exit statuses of ended children and adopted orphans."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def keep(driver: int, folder: str, command: list[str]) -> None:
    """Run `command`, then wait until the driver lets go."""
    watched = select.poll()
    watched.register(os.pidfd_open(driver), select.POLLIN)
    watched.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    with open(os.path.join(folder, "start.log"), "wb") as log:
        starter = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    started = os.pidfd_open(starter.pid)
    watched.register(started, select.POLLIN)
    ready = [fd for fd, _ in watched.poll()]
    if ready == [started]:
        print("ready" if starter.wait() == 0 else "failed", flush=True)
        watched.unregister(started)
        vital = {os.pidfd_open(pid): name for pid in descendants(os.getpid()) if (name := _name(pid)) in VITAL}
        for process in vital:
            watched.register(process, select.POLLIN)
        signal.signal(signal.SIGCHLD, reap)
        reap()
        ended = [vital[fd] for fd, _ in watched.poll() if fd in vital]
        if ended:
            print(f"Ray's {ended[0]} has ended, and so all that ran with it", file=sys.stderr, flush=True)
            _kill(driver, signal.SIGKILL)  # as Ray would, at its next call or a minute later, and without a word


def main() -> None:
    driver, folders, command = int(sys.argv[1]), sys.argv[2].split(os.pathsep), sys.argv[3:]
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        if os.getppid() == driver:
            keep(driver, folders[0], command)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sweep(os.getpid())
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
