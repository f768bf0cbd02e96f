"""Marked processes end with their owner: on purpose, and when it is killed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest

from llmproxy import reaper

pytestmark = pytest.mark.real

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
OWNER = f"""
import os, subprocess
from llmproxy import reaper
watching = reaper.start("a mark")
child = subprocess.Popen({SLEEP!r}, env={{**os.environ, reaper.MARK: "a mark"}}, start_new_session=True)
print(child.pid, watching.pid, flush=True)
os.read(0, 1)
"""


def ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 20)[0])


def test_closing_the_input_kills_what_is_marked_and_nothing_else() -> None:
    mark = uuid4().hex
    marked = [subprocess.Popen(SLEEP, env={**os.environ, reaper.MARK: mark}) for _ in range(2)]
    other = subprocess.Popen(SLEEP, env={**os.environ, reaper.MARK: uuid4().hex})
    watching = reaper.start(mark)
    assert all(process.poll() is None for process in (*marked, other, watching))
    watching.communicate()
    assert [process.wait(20) for process in marked] == [-signal.SIGKILL] * 2
    assert watching.returncode == 0 and other.poll() is None
    other.kill()
    other.wait()


def test_a_killed_owner_takes_its_engine_along() -> None:
    code = OWNER.replace("a mark", uuid4().hex)
    owner = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None and owner.stdin is not None
    child, watching = map(int, owner.stdout.readline().split())
    handles = [os.pidfd_open(child), os.pidfd_open(watching)]
    owner.kill()
    owner.communicate()
    assert all(map(ended, handles))
    for handle in handles:
        os.close(handle)


LEAVES = """
import multiprocessing, os, signal, time
from llmproxy import reaper


def engine(pipe):
    lock = multiprocessing.get_context("spawn").Lock()
    pipe.send((os.getpid(), lock._semlock.name))
    time.sleep(600)


if __name__ == "__main__":
    os.environ[reaper.MARK] = "a mark"
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    with reaper.marked_semaphores("a mark"):
        spawn.Process(target=engine, args=(theirs,)).start()
    watching = reaper.start("a mark")
    own = spawn.Lock()
    print(*ours.recv(), own._semlock.name, watching.pid, flush=True)
    if (word := os.read(0, 1)) == b"c":
        watching.communicate()
    elif word == b"t":
        os.killpg(watching.pid, signal.SIGTERM)
        watching.wait()
    elif word == b"o":
        watching.kill()
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("how", ["closed", "terminated", "killed", "orphaned"])
def test_a_killed_engine_leaves_no_semaphore(tmp_path: Path, how: str) -> None:
    """Whichever way its owner went, with the watcher or after it. The owner's own is the owner's business."""
    program = tmp_path / "owner.py"
    program.write_text(LEAVES.replace("a mark", uuid4().hex))
    with subprocess.Popen(
        [sys.executable, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdin is not None and owner.stdout is not None
        engine, *names, watching = owner.stdout.readline().split()
        theirs, own = (Path("/dev/shm", f"sem.{name.removeprefix('/')}") for name in names)
        assert theirs.exists() and own.exists()
        while not (children := Path(f"/proc/{watching}/task/{watching}/children").read_text().split()):
            pass  # it is just being started
        handles = [os.pidfd_open(int(pid)) for pid in (engine, *children)]
        owner.stdin.write(how[0])
        owner.stdin.close()
        assert all(map(ended, handles))
        for handle in handles:
            os.close(handle)
    assert not theirs.exists()
    own.unlink(missing_ok=True)
