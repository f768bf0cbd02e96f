"""Connections to a worker: each request ends once, and nothing is taken for an answer that is not one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from tests.llmproxy.gateways import until

from llmproxy import WorkerLost
from llmproxy.upstream import Answer, Pool, call, head

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter, int], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


@asynccontextmanager
async def scripted(script: Script) -> AsyncIterator[Pool]:
    """A server that runs `script` for each connection, counted from 0."""
    count = 0

    tasks: set[asyncio.Task[None]] = set()

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        try:
            await script(reader, writer, number)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        task = asyncio.get_running_loop().create_task(one(reader, writer, count))
        tasks.add(task)
        count += 1

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    pool = Pool(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/base")
    try:
        yield pool
    finally:
        pool.abort()
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def request(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\n")


def answering(*answers: bytes) -> Script:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        for answer in answers:
            await request(reader)
            writer.write(answer)
            await writer.drain()

    return script


async def test_a_whole_answer_and_the_path_of_the_base() -> None:
    heads: list[bytes] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        while True:
            heads.append(await request(reader))
            writer.write(OK)

    async with scripted(script) as pool:
        for _ in range(3):
            answer = await call(pool, "GET", "/x", headers=b"a: b\r\n")
            assert (answer.status, answer.body) == (200, b"ok")
        assert len(pool) == len(pool.idle) == 1
        assert heads[0].startswith(b"GET /base/x HTTP/1.1\r\nhost: 127.0.0.1:") and b"\r\na: b\r\n" in heads[0]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nabcd",
        b"HTTP/1.1 200 OK\r\n\r\nits end is the connection's end",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabcX",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\nok",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\na: " + b"b" * 100_000 + b"\r\ncontent-length: 2\r\n\r\nok",
        b"nonsense",
    ],
)
async def test_what_is_not_whole_is_lost(data: bytes) -> None:
    async with scripted(answering(data)) as pool:
        with pytest.raises(WorkerLost):
            await call(pool, "GET", "/x")
        await until(lambda: len(pool) == 0)


async def test_bytes_after_an_answer_are_never_taken_for_the_next_one() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        await request(reader)
        writer.write(OK + (b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil" if number == 0 else b""))
        await request(reader)
        writer.write(OK)

    async with scripted(script) as pool:
        assert (await call(pool, "GET", "/x")).body == b"ok"
        assert not pool.idle
        assert (await call(pool, "GET", "/x")).body == b"ok"


async def test_bytes_that_nobody_asked_for_end_the_connection() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        await request(reader)
        writer.write(OK)
        await asyncio.sleep(0.02)
        writer.write(OK)
        await reader.read()

    async with scripted(script) as pool:
        await call(pool, "GET", "/x")
        await until(lambda: len(pool) == 0)


async def test_an_informational_answer_comes_before_the_answer() -> None:
    async with scripted(answering(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + OK)) as pool:
        assert (await call(pool, "GET", "/x")).body == b"ok"


async def test_an_idle_connection_that_the_server_ended_is_replaced() -> None:
    arrived: list[int] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        await request(reader)
        arrived.append(number)
        writer.write(OK)
        await writer.drain()
        if number == 0:
            await request(reader)  # takes the second request, and closes without one byte
            return
        await reader.read()

    async with scripted(script) as pool:
        assert (await call(pool, "GET", "/x")).body == b"ok"
        assert (await call(pool, "GET", "/x")).body == b"ok"
        assert arrived == [0, 1]


async def test_a_new_connection_that_ends_is_not_tried_again() -> None:
    async with scripted(answering(b"")) as pool:
        with pytest.raises(WorkerLost, match="before an answer"):
            await call(pool, "GET", "/x")


async def test_the_servers_wish_to_close_is_obeyed() -> None:
    async with scripted(answering(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok")) as pool:
        assert (await call(pool, "GET", "/x")).body == b"ok"
        assert not pool.idle


async def test_the_owner_is_told_when_an_idle_connection_ends() -> None:
    async with scripted(answering(OK)) as pool:
        ended = asyncio.Event()
        pool._on_closed = ended.set
        await call(pool, "GET", "/x")
        await asyncio.wait_for(ended.wait(), 5)


async def test_cancelling_closes_the_connection() -> None:
    gone = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        await request(reader)
        await reader.read()
        gone.set()

    async with scripted(script) as pool:
        asked = asyncio.create_task(call(pool, "GET", "/x"))
        await until(lambda: len(pool) == 1)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await asyncio.wait_for(gone.wait(), 5)


async def test_cancelling_while_connecting() -> None:
    async with scripted(answering(OK)) as pool:
        answer = Answer(100)
        pool.send(answer, head(pool, "GET", "/x", 0), b"")
        pool.cancel(answer)
        await asyncio.sleep(0.05)
        assert len(pool) == 0 and not answer.done.done()


async def test_ending_a_pool_ends_what_it_carries() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        await reader.read()

    async with scripted(silent) as pool:
        early = asyncio.create_task(call(pool, "GET", "/x"))
        await until(lambda: len(pool) == 1)
        late = asyncio.create_task(call(pool, "GET", "/x"))
        await asyncio.sleep(0)
        pool.abort()
        for one in (early, late):
            with pytest.raises(WorkerLost):
                await one


async def test_a_long_answer_is_not_kept() -> None:
    async with scripted(answering(b"HTTP/1.1 200 OK\r\ncontent-length: 200000\r\n\r\n" + b"x" * 200_000)) as pool:
        with pytest.raises(WorkerLost, match="too long"):
            await call(pool, "GET", "/x", limit=1000)


@pytest.mark.parametrize("url", ["", "host:80", "ftp://host", "http://"])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(ValueError, match="such as http://127"):
        Pool(url)


def test_a_password_in_a_url_is_not_told() -> None:
    assert Pool("http://me:secret@host:81/v2/").url == "http://host:81/v2"


def test_parts_of_a_url() -> None:
    pool = Pool("http://user@host:81/v2/")
    assert (pool.host, pool.port, pool.authority, pool.prefix) == ("host", 81, b"host:81", b"/v2")
    assert Pool("https://host").port == 443
