"""Marked processes end with their owner: on purpose, and when it is killed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
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
