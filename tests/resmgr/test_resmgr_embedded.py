"""The embedded server: started once, shared, and gone with its owner."""

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from resmgr import Closed, Invalid, Pool, Request, ResourceManager, StoreUnavailable
from resmgr.embedded import LONGEST_SOCKET_PATH, EmbeddedServer
from resmgr.process import identity, is_dead

pytestmark = pytest.mark.real

OWNER = """
import asyncio, sys
from resmgr import Pool, Request, ResourceManager
async def main():
    rm = await ResourceManager.connect("embedded:" + sys.argv[1])
    await rm.register(Pool("a", hardware="cpu", total=8))
    await rm.bind(Request("x", prefer=["cpu"], amount=3), timeout=0)
    print("ready", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


def start_owner(url: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", OWNER, url], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


async def end(process: subprocess.Popen[str], how: signal.Signals = signal.SIGKILL) -> None:
    process.send_signal(how)
    await asyncio.to_thread(process.wait)
    assert process.stdout is not None
    process.stdout.close()


async def gone(server: EmbeddedServer) -> None:
    """Returns when the directory's lock is free: no server runs."""
    lock = os.open(server.directory / "lock", os.O_RDONLY)
    await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
    os.close(lock)


async def test_the_owner_stops_its_server_and_the_next_one_finds_what_was_there(tmp_path):
    async with await ResourceManager.connect(f"embedded:{tmp_path}") as rm:
        await rm.register(Pool("a", hardware="cpu", total=8))
    await asyncio.wait_for(gone(EmbeddedServer(tmp_path)), 5)
    async with await ResourceManager.connect(f"embedded:{tmp_path}") as rm:
        assert [p.name for p in (await rm.status()).pools] == ["a"]


async def test_a_second_process_uses_the_first_ones_server_and_starts_its_own_when_that_is_killed(tmp_path):
    process = await asyncio.to_thread(start_owner, str(tmp_path))
    async with await ResourceManager.connect(f"embedded:{tmp_path}") as rm:
        assert rm._store.server is not None and rm._store.server.pid is None
        assert (await rm.status()).pools[0].free == 5
        await end(process)
        await asyncio.wait_for(gone(EmbeddedServer(tmp_path)), 5)
        assert (await rm.status()).pools[0].free == 5
        assert rm._store.server.pid is not None


async def test_what_a_killed_process_held_is_free_at_once_for_the_next(tmp_path):
    process = await asyncio.to_thread(start_owner, str(tmp_path))
    await end(process)
    loop = asyncio.get_running_loop()
    begun = loop.time()
    async with await ResourceManager.connect(f"embedded:{tmp_path}") as rm:
        await rm.bind(Request("x", prefer=["cpu"], amount=8), timeout=30)
        assert loop.time() - begun < rm.ttl / 2


def test_only_a_process_that_is_surely_dead_is_called_so():
    here = identity()
    machine, pid, start = here.split(".")
    assert not is_dead(here)
    assert is_dead(f"{machine}.{pid}.{int(start) - 1}")
    assert not is_dead(f"elsewhere.{pid}.{int(start) - 1}")
    for unknown in ("", "x", f"{machine}.", f"{machine}.x.y"):
        assert not is_dead(unknown)
    child = subprocess.Popen(["sleep", "60"])
    other = f"{machine}.{child.pid}.{Path(f'/proc/{child.pid}/stat').read_text().rpartition(')')[2].split()[19]}"
    assert not is_dead(other)
    child.kill()
    child.wait()
    assert is_dead(other)


async def test_a_killed_owner_takes_its_server_along(tmp_path):
    process = await asyncio.to_thread(start_owner, str(tmp_path))
    await end(process)
    await asyncio.wait_for(gone(EmbeddedServer(tmp_path)), 5)


async def test_a_call_that_waits_for_the_store_ends_with_its_manager_and_starts_no_server(tmp_path):
    rm = await ResourceManager.connect(f"embedded:{tmp_path}")
    server = rm._store.server
    assert server is not None and server.pid is not None
    server.start = lambda: None  # type: ignore[method-assign]
    os.kill(server.pid, signal.SIGKILL)
    asking = asyncio.create_task(rm.status())
    await gone(server)
    await asyncio.sleep(0)
    del server.start
    await rm.close()
    with pytest.raises(Closed):
        await asyncio.wait_for(asking, 5)
    assert not await server.answers()
    await asyncio.wait_for(gone(server), 1)


async def test_the_server_is_in_no_process_group_of_its_owner(tmp_path):
    server = EmbeddedServer(tmp_path)
    await server.ensure()
    assert server.pid is not None
    assert os.getpgid(server.pid) == server.pid != os.getpgrp()
    await server.stop()


async def test_a_persistent_server_outlives_its_owner_until_it_is_stopped(tmp_path):
    process = await asyncio.to_thread(start_owner, f"{tmp_path}?persist=1")
    await end(process)
    rm = await ResourceManager.connect(f"embedded:{tmp_path}")
    assert rm._store.server is not None and rm._store.server.pid is None
    assert (await rm.status()).pools[0].total == 8
    await rm._store.shutdown()
    await rm.close()
    await asyncio.wait_for(gone(EmbeddedServer(tmp_path)), 5)


async def test_many_at_once_start_one_server(tmp_path):
    servers = [EmbeddedServer(tmp_path) for _ in range(5)]
    await asyncio.gather(*(server.ensure() for server in servers))
    assert sum(server.pid is not None for server in servers) == 1
    for server in servers:
        await server.stop()


async def test_a_long_directory_gets_a_short_socket(tmp_path):
    directory = tmp_path / ("d" * 120)
    async with await ResourceManager.connect(f"embedded:{directory}") as rm:
        assert rm._store.server is not None
        assert len(str(rm._store.server.socket_path)) <= LONGEST_SOCKET_PATH
        await rm.register(Pool("a", hardware="cpu", total=8))
    assert (directory / "appendonlydir").is_dir()


async def test_a_directory_that_others_can_write_is_refused(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(StoreUnavailable, match="not be writable by others"):
        await ResourceManager.connect(f"embedded:{shared}")


async def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreUnavailable, match="give another directory"):
            await ResourceManager.connect(f"embedded:{directory}")


async def test_a_directory_may_have_any_letters(tmp_path):
    async with await ResourceManager.connect(f"embedded:{tmp_path / 'ü ñ 日本'}") as rm:
        await rm.register(Pool("池", hardware="ж", total=8))
        assert (await rm.bind(Request("génération", prefer=["ж"]), timeout=0)).nodes == ("池",)


@pytest.mark.parametrize(
    "url",
    [
        "embedded:",
        "embedded:d?persist=maybe",
        "embedded:d\0",
        "http://x",
        "redis//x",
        "redis://[x",
        "redis://localhost:99999",
        "redis://localhost?nothing=1",
        None,
    ],
)
async def test_a_url_that_is_none_is_refused(url):
    with pytest.raises(Invalid, match="url="):
        await ResourceManager.connect(url)


async def test_starting_up_costs_well_under_a_second(tmp_path: Path):
    loop = asyncio.get_running_loop()
    begun = loop.time()
    async with await ResourceManager.connect(f"embedded:{tmp_path}") as rm:
        await rm.register(Pool("a", hardware="cpu", total=8))
        for role in ("actor_gen", "actor_gen", "actor_train", "environment", "reward"):
            await rm.bind(Request(role, prefer=["cpu"], amount=0.5), timeout=5)
        assert loop.time() - begun < 3  # 0.1 s on an idle machine
