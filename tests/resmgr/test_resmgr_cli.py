"""The command as its users see it."""

import asyncio
import contextlib
import json
import re
import sys
from collections.abc import AsyncIterator

import pytest

from resmgr import Binding, Pool, Request
from resmgr.cli import main
from resmgr.embedded import EmbeddedServer
from resmgr.metrics import prometheus_text
from resmgr.status import Status
from resmgr.table import render

pytestmark = pytest.mark.real

SCRIPT = "import sys; from resmgr.cli import main; sys.exit(main())"


@contextlib.asynccontextmanager
async def command(*arguments: str) -> AsyncIterator[asyncio.StreamReader]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SCRIPT, *arguments, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield process.stdout
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def read_until(stream: asyncio.StreamReader, pattern: str) -> str:
    seen = ""
    while not re.search(pattern, seen, re.S):
        line = await stream.readline()
        assert line, f"ended without {pattern}: {seen}"
        seen += line.decode()
    return seen


@pytest.fixture
async def busy(place):
    rm = await place.connect()
    await rm.register(Pool("a", hardware="H800", total=4))
    await rm.register(Pool("b", hardware="H20", total=8, backend="ray"))
    request = Request("gen", prefer=["H800"], fallback=["H20"], amount=3)
    await rm.bind(request, timeout=0)
    await rm.annotate(await rm.bind(request, timeout=0), {"address": "10.0.0.1"})
    return rm


async def test_status_shows_pools_bindings_and_fallbacks(place, busy):
    async with command("status", place.url, "--namespace", place.namespace) as out:
        text = (await out.read()).decode()
    rows = [line.split() for line in text.splitlines()]
    assert ["a", "H800", "static", "1", "4", "1", "75%"] in rows
    assert any(row[:5] == ["gen", "H20", "fell", "back", "3"] and row[-1] == "address=10.0.0.1" for row in rows)
    assert rows[-2:] == [["WAITING", "AMOUNT", "FOR", "PRIORITY"], ["(none)"]]


async def test_status_as_json(place, busy):
    async with command("status", "--json", place.url, "--namespace", place.namespace) as out:
        status = json.loads(await out.read())
    assert status["counts"] == {"registered": 2, "bound": 1, "fell_back": 1}


async def test_a_reader_that_has_seen_enough_is_no_error(place, busy):
    shell = 'set -o pipefail; "$@" | true'
    arguments = ("-c", SCRIPT, "status", "--watch", "--json", place.url, "--namespace", place.namespace)
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", shell, "bash", sys.executable, *arguments, stderr=asyncio.subprocess.PIPE
    )
    ended = asyncio.ensure_future(process.communicate())
    while not ended.done():
        await busy.release(await busy.bind(Request("late", prefer=["H20"]), timeout=0))
    assert (process.returncode, (await ended)[1]) == (0, b"")


async def test_watch_prints_again_when_something_happens(place, busy):
    async with command("status", "--watch", place.url, "--namespace", place.namespace) as out:
        await read_until(out, r"WAITING.*\(none\)")
        task = asyncio.create_task(busy.bind(Request("late", prefer=["H800"])))
        await read_until(out, r"late +H800")
        await task
        await place.raw("DEL", "events")
        await busy.bind(Request("later", prefer=["H20"]), timeout=0)
        await read_until(out, r"later +H20")


async def test_serve_answers_scrapes(place, busy):
    async with command("serve", "--port", "0", place.url, "--namespace", place.namespace) as out:
        port = int((await out.readline()).decode().rsplit(":", 1)[1].partition("/")[0])

        async def get(path: str) -> str:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            answer = await reader.read()
            writer.close()
            return answer.decode()

        text = await get("/metrics")
        assert text.startswith("HTTP/1.1 200 OK")
        assert 'resmgr_pool_free_units{pool="a",hardware="H800",backend="static"} 1\n' in text
        assert 'resmgr_bindings{role="gen",hardware="H20",fell_back="1"} 1\n' in text
        assert 'resmgr_events_total{kind="fell_back"} 1\n' in text
        assert (await get("/")).startswith("HTTP/1.1 404")


def test_a_store_that_is_not_there_is_an_error_and_is_not_made(tmp_path, capsys):
    assert main(["status", f"embedded:{tmp_path}/none"]) == 2
    assert "there is no store" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
    assert main(["stop", f"embedded:{tmp_path}/none"]) == 2
    assert main(["stop", "redis://127.0.0.1:1"]) == 2
    (tmp_path / "folder").mkdir(mode=0o700)
    assert main(["status", f"embedded:{tmp_path}/folder"]) == 2
    assert "there is no store" in capsys.readouterr().err and not list((tmp_path / "folder").iterdir())


async def test_a_port_that_cannot_be_had_is_told(place, busy, capsys):
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    taken = server.sockets[0].getsockname()[1]
    for port in (taken, 99_999):
        arguments = ["serve", place.url, "--namespace", place.namespace, "--port", str(port)]
        assert await asyncio.to_thread(main, arguments) == 2
        assert f"port={port} cannot be listened on" in capsys.readouterr().err
    server.close()


def test_stop_ends_a_persistent_server(tmp_path, capsys):
    server = EmbeddedServer(tmp_path, persist=True)

    async def start() -> None:
        await server.ensure()
        await server.stop()

    asyncio.run(start())
    assert main(["status", f"embedded:{tmp_path}"]) == 0
    assert main(["stop", f"embedded:{tmp_path}"]) == 0
    assert not server.socket_path.exists()
    assert main(["stop", f"embedded:{tmp_path}"]) == 0
    out, err = capsys.readouterr()
    assert out.endswith(f"{tmp_path}: no server runs here; stopped already\n") and err == ""


def test_a_note_does_not_change_the_table():
    binding = Binding("b", "gen", "H800", False, 1, 1, 7, (), "o", "h")
    note = {"b": {"address": "a\nb\x1b[31m ü"}}
    line = render(Status((), (binding,), (), {}, note, {}, 0, 10, "2")).splitlines()[4]
    assert line.startswith("gen") and line.endswith(r"address=a\nb\x1b[31m ü")


def test_counts_are_exact_however_large():
    status = Status((), (), (), {}, {}, {"bound": 12_345_678}, 0, 10, "2")
    assert 'resmgr_events_total{kind="bound"} 12345678\n' in prometheus_text(status)
