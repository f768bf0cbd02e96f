"""Environments in bubblewrap, which try to get out."""

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

from envmanager import InfrastructureError
from envmanager.backends import SubprocessBackend
from envmanager.backends.sandbox import bubblewrap, imports

INSIDE = "tests.envmanager.inside:Inside"


def no_sandbox() -> str:
    """Why there can be no sandbox on this machine, or nothing."""
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    tried = subprocess.run(["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"], capture_output=True, text=True)
    return "" if tried.returncode == 0 else f"bubblewrap does not work here: {tried.stderr.strip()}"


real = pytest.mark.real


@pytest.fixture
async def inside():
    if reason := no_sandbox():
        pytest.skip(reason)
    async with SubprocessBackend(INSIDE, sandbox=True, environ={"FOR_IT": "yes"}) as backend:
        env = backend("k")
        await env.reset(seed=0)

        async def ask(expression: str) -> str:
            return (await env.step(expression))[0]

        yield ask
        await env.close()


@real
async def test_nothing_gets_out(inside, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert await inside(f"socket.create_connection(('127.0.0.1', {port}), 1)") in (
            "ConnectionRefusedError",
            "OSError",
        )
    assert await inside("open('/etc/x', 'w')") == "OSError"
    assert await inside(f"open({str(tmp_path / 'x')!r}, 'w')") in ("OSError", "FileNotFoundError")
    assert await inside(f"os.kill({os.getpid()}, 9)") in ("ProcessLookupError", "PermissionError")
    pids = await inside("[int(p) for p in os.listdir('/proc') if p.isdigit()]")
    assert str(os.getpid()) not in pids.strip("[]").split(", ")
    assert len(eval(pids)) < 8


@real
async def test_what_is_inside(inside):
    assert await inside("open('/tmp/x', 'w').write('12')") == "2"
    assert await inside("os.environ['FOR_IT'], os.environ['HOME']") == "('yes', '/tmp')"
    assert await inside("set(os.environ) & {'SECRET', 'OPENAI_API_KEY', 'USER'}") == "set()"
    assert await inside("subprocess.run(['sh', '-c', 'exit 3']).returncode") == "3"
    assert not os.path.exists("/tmp/x") or Path("/tmp/x").read_text() != "12"
    home = await inside("[f for f in glob.glob(os.path.expanduser('~root') + '/.*')]")
    assert ".ssh" not in home and ".config" not in home


@real
async def test_memory_is_bounded_inside():
    if reason := no_sandbox():
        pytest.skip(reason)
    async with SubprocessBackend(INSIDE, sandbox=True, memory_bytes=256 << 20) as backend:
        env = backend("k")
        await env.reset(seed=0)
        with pytest.raises(InfrastructureError, match="MemoryError"):
            await env.step("len(bytearray(1 << 30))")
        await env.close()


@real
async def test_a_daemon_ends_with_its_sandbox():
    if reason := no_sandbox():
        pytest.skip(reason)
    mark = f"1000.{os.getpid()}"
    async with SubprocessBackend(INSIDE, sandbox=True) as backend:
        env = backend("k")
        await env.reset(seed=0)
        started = f"subprocess.Popen(['setsid', 'sleep', '{mark}']).pid"
        assert int((await env.step(started))[0]) > 0
        assert becomes(mark, True)
        await env.close()
        assert becomes(mark, False)
    assert backend.stats().started == backend.stats().ended == 1


def becomes(mark: str, there: bool) -> bool:
    """A process shows its words only once it has become what it is to be, and may be ended a moment later."""
    until = time.monotonic() + 20
    while running(mark) != there and time.monotonic() < until:
        time.sleep(0.01)
    return running(mark) == there


def running(mark: str) -> bool:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if mark in (folder / "cmdline").read_text().split("\0"):
                    return True
            except (FileNotFoundError, ProcessLookupError):
                continue
    return False


def test_without_bubblewrap_it_is_said(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(InfrastructureError, match="apt-get install bubblewrap"):
        SubprocessBackend(INSIDE, sandbox=True)
    with pytest.raises(InfrastructureError):
        bubblewrap()


def test_no_folder_is_bound_twice():
    folders = imports()
    assert folders and not any(a != b and a.startswith(f"{b}/") for a in folders for b in folders)
