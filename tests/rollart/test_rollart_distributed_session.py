"""A local Ray: where it listens, who hears Ctrl-C, and that nothing is left of it."""

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from rollart.distributed import RaySession, SessionFailed

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]

ACTOR = """
import os, subprocess
class Parent:
    def child(self):
        # A grandchild of the driver in a session of its own, as an engine's processes may be.
        return os.getpid(), subprocess.Popen(["sleep", "600"], start_new_session=True).pid
"""
DRIVER = (
    ACTOR
    + """
import asyncio, json, signal, sys
from pathlib import Path
from rollart.distributed import RaySession

async def main():
    interrupted = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupted.set)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: print("told to end", flush=True))
    async with RaySession(owns=[Path(sys.argv[1])]):
        import psutil, ray
        parent = ray.remote(Parent).options(num_cpus=0.05).remote()
        await parent.child.remote()
        below = [process.pid for process in psutil.Process().children(recursive=True)]
        print(json.dumps(below), flush=True)
        await interrupted.wait()
        print(json.dumps(await parent.child.remote()), flush=True)
        await asyncio.get_running_loop().create_future()

asyncio.run(main())
"""
)


def gone(processes: list[psutil.Process], seconds: float = 15) -> bool:
    """Whether all have ended, zombies of other parents included."""
    left = psutil.wait_procs(processes, timeout=seconds)[1]
    return all(process.status() == psutil.STATUS_ZOMBIE for process in left)


def removed(folder: Path, seconds: float = 5) -> bool:
    """Whether a folder goes in time."""
    deadline = time.monotonic() + seconds
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return not folder.exists()


@pytest.fixture(scope="module")
def earlier() -> list[psutil.Process]:
    """What other tests of this process have left running, such as multiprocessing's trackers."""
    return psutil.Process().children(recursive=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def session(earlier: list[psutil.Process]) -> AsyncIterator[RaySession]:
    async with RaySession() as session:
        yield session


@pytest.fixture(scope="module")
def owned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the driver's session owns."""
    folder = tmp_path_factory.mktemp("owned")
    (folder / "weights").write_text("x")
    return folder


@pytest.fixture(scope="module")
def driver(owned: Path) -> Iterator[tuple[subprocess.Popen[str], int, list[int]]]:
    """A driver in the foreground of a terminal of its own: the process, its terminal, and the processes below it."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(owned)],
        stdin=slave,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
    )
    os.close(slave)
    assert process.stdout is not None
    try:
        yield process, master, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        os.close(master)


async def test_interrupt_reaches_only_the_driver(driver: tuple[subprocess.Popen[str], int, list[int]]) -> None:
    process, terminal, below = driver
    assert process.stdout is not None
    os.write(terminal, b"\x03")
    pids = json.loads(await asyncio.to_thread(process.stdout.readline))
    assert pids[0] in below, "the actor that answers after Ctrl-C is the one from before"
    assert all(psutil.pid_exists(pid) for pid in below)
    below.extend(pids)


async def test_a_termination_is_the_drivers_to_handle(
    driver: tuple[subprocess.Popen[str], int, list[int]],
) -> None:
    """Ray has a handler of its own, which prints a crash report and aborts."""
    process, _, _ = driver
    assert process.stdout is not None
    process.terminate()
    assert await asyncio.to_thread(process.stdout.readline) == "told to end\n"
    assert process.poll() is None


async def test_nothing_outlives_a_killed_driver(
    driver: tuple[subprocess.Popen[str], int, list[int]], owned: Path
) -> None:
    process, _, below = driver
    processes = [psutil.Process(pid) for pid in dict.fromkeys(below)]
    assert {"gcs_server", "raylet", "sleep"} <= {p.name() for p in processes}
    assert (owned / "weights").exists()
    process.kill()
    assert await asyncio.to_thread(gone, processes)
    assert await asyncio.to_thread(removed, owned)


async def test_only_loopback_listens(session: RaySession) -> None:
    listening = []
    for process in psutil.Process().children(recursive=True):
        listening += [c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert listening and set(listening) <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    assert session.address.startswith("127.0.0.1:")


async def test_a_session_is_started_once(session: RaySession) -> None:
    with pytest.raises(SessionFailed, match="stop it first"):
        await session.start()


async def test_stop_leaves_nothing(session: RaySession, earlier: list[psutil.Process]) -> None:
    """Not even what a killed actor had started in a session of its own."""
    import ray

    names: dict[str, Any] = {}
    exec(ACTOR, names)
    parent = ray.remote(names["Parent"]).options(num_cpus=0.05).remote()
    pid, child = await parent.child.remote()
    processes = [process for process in psutil.Process().children(recursive=True) if process not in earlier]
    assert child in [process.pid for process in processes]
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(10):
        await session.stop()
        await session.stop()
    assert await asyncio.to_thread(gone, processes)


async def test_a_failed_start_says_why_and_leaves_nothing() -> None:
    before = psutil.Process().children(recursive=True)
    session = RaySession(object_store_bytes=1)
    with pytest.raises(SessionFailed, match="object store"):
        await session.start()
    assert psutil.Process().children(recursive=True) == before


@pytest.mark.parametrize("part", ["raylet", "gcs_server"])
async def test_what_ray_cannot_do_without_is_named_when_it_dies(tmp_path: Path, part: str) -> None:
    """Ray ends its driver too, but later and without a word."""
    driver = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", DRIVER, str(tmp_path / "owned")),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert driver.stdout is not None
    assert driver.stderr is not None
    below = [psutil.Process(pid) for pid in json.loads(await driver.stdout.readline())]
    (found,) = [process for process in below if process.name() == part]
    found.kill()
    async with asyncio.timeout(20):
        assert f"Ray's {part} has ended" in (await driver.stderr.readline()).decode()
        assert await driver.wait() == -signal.SIGKILL
    assert await asyncio.to_thread(gone, below)
