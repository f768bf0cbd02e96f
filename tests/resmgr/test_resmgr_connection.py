"""The shared connection: replies however they are cut, every call ends, nobody gets another's answer."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio.connection import parse_url
from redis.exceptions import AuthenticationError, BusyLoadingError, ConnectionError, ResponseError, TimeoutError

from resmgr.connection import Connection, Replies, _tls, packed

VALUES = st.recursive(
    st.one_of(st.none(), st.integers(-(2**60), 2**60), st.binary(max_size=20)),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=12,
)


def encoded(value: Any) -> bytes:
    match value:
        case None:
            return b"$-1\r\n"
        case int():
            return b":%d\r\n" % value
        case bytes():
            return b"$%d\r\n%b\r\n" % (len(value), value)
    return b"*%d\r\n" % len(value) + b"".join(encoded(part) for part in value)


@given(st.lists(VALUES, max_size=4), st.lists(st.integers(1, 7), min_size=1, max_size=50))
def test_replies_are_the_same_however_they_are_cut(values: list[Any], cuts: list[int]) -> None:
    data, replies, found, at = b"".join(encoded(value) for value in values), Replies(), [], 0
    while at < len(data):
        step = cuts[at % len(cuts)]
        found += replies.feed(data[at : at + step])
        at += step
    assert found == values


def test_errors_simple_strings_and_empty_arrays() -> None:
    ok, error, nothing, empty = Replies().feed(b"+OK\r\n-ERR no\r\n*-1\r\n*0\r\n")
    assert (ok, nothing, empty) == (b"OK", None, [])
    assert isinstance(error, ResponseError) and str(error) == "ERR no"
    loading, refused = Replies().feed(b"-LOADING wait\r\n-WRONGPASS x\r\n")
    assert isinstance(loading, BusyLoadingError) and isinstance(refused, AuthenticationError)


@given(st.lists(st.one_of(st.text(max_size=8), st.binary(max_size=8), st.integers()), min_size=1, max_size=5))
def test_commands_are_what_the_server_reads(command: list[Any]) -> None:
    (read,) = Replies().feed(packed(tuple(command)))
    assert read == [part if isinstance(part, bytes) else str(part).encode() for part in command]


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def connected(serve: Serve, io_timeout: float = 5.0) -> AsyncIterator[Connection]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    connection = Connection(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0", io_timeout)
    async with server:
        yield connection
        connection.close()


async def command(reader: asyncio.StreamReader) -> bytes:
    """The one argument of a command."""
    await reader.readline()
    size = int((await reader.readline())[1:])
    return (await reader.readexactly(size + 2))[:-2]


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while not reader.at_eof():
        try:
            word = await command(reader)
        except (asyncio.IncompleteReadError, ValueError, ConnectionResetError):
            return
        writer.write(encoded(word))


async def test_calls_of_one_turn_travel_in_one_write() -> None:
    reads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reads.append(await reader.read(1 << 16))
        writer.write(b":1\r\n:2\r\n:3\r\n:4\r\n")
        await reader.read()

    async with connected(serve) as connection:
        await connection._connected()
        answers = await asyncio.gather(*(connection.call(packed((n,))) for n in range(4)))
    assert answers == [1, 2, 3, 4]
    assert reads == [b"".join(packed((n,)) for n in range(4))]


async def test_an_answer_that_nobody_waits_for_is_passed_over() -> None:
    async with connected(echo) as connection:
        assert await connection.call(packed(("a",))) == b"a"
        gone = [asyncio.ensure_future(connection.call(packed((word,)))) for word in "bc"]
        await asyncio.sleep(0)
        for call in gone:
            call.cancel()
        assert await connection.call(packed(("d",))) == b"d"


async def test_a_server_that_goes_ends_the_calls_and_the_next_connects_again() -> None:
    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await command(reader) == b"go on":
            writer.write(b"+OK\r\n")

    async with connected(once) as connection:
        calls = [connection.call(packed(("leave",))), connection.call(packed(("x",)))]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(result, ConnectionError) for result in results)
        assert await connection.call(packed(("go on",))) == b"OK"


async def test_silence_ends_the_calls_after_the_timeout() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with connected(silent, io_timeout=0.1) as connection:
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(TimeoutError, match=r"within 0.1 s"):
            await connection.call(packed(("x",)))
        assert 0.09 < loop.time() - began < 5


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400\r\n", b"$x\r\n", b"+OK\r\n+OK\r\n"])
async def test_what_is_no_reply_ends_the_connection(answer: bytes) -> None:
    async def wrong(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await command(reader)
        writer.write(answer)
        await reader.read()

    async with connected(wrong) as connection:
        line = await connection._connected()
        answers = await asyncio.gather(connection.call(packed(("x",))), return_exceptions=True)
        assert isinstance(answers[0], ConnectionError) or answer.startswith(b"+OK")
        while not line.closed:  # noqa: ASYNC110 - the second answer is on its way
            await asyncio.sleep(0.001)


async def test_a_closed_connection_stays_closed() -> None:
    async with connected(echo) as connection:
        await connection.call(packed(("a",)))
        under_way = asyncio.ensure_future(connection.call(packed(("b",))))
        await asyncio.sleep(0)
        connection.close()
        for call in (under_way, connection.call(packed(("c",)))):
            with pytest.raises(ConnectionError, match="closed the connection"):
                await call


async def test_user_password_and_database_are_said_first() -> None:
    said: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(3):
            parts = int((await reader.readline())[1:])
            said.append(
                b" ".join([(await reader.readline(), await reader.readline())[1].strip() for _ in range(parts)])
            )
            writer.write(b"+OK\r\n")

    async with connected(serve) as connection:
        connection._parts |= {"username": "u", "password": "p", "db": 3}
        await connection.call(packed(("x",)))
    assert said == [b"AUTH u p", b"SELECT 3", b"x"]


def test_rediss_is_encrypted_and_checked_unless_the_url_says_otherwise() -> None:
    def tls(url: str) -> ssl.SSLContext | None:
        return _tls(dict(parse_url(url)))

    assert tls("redis://host") is None and tls("unix:///socket") is None
    checked, unchecked = tls("rediss://host"), tls("rediss://host?ssl_cert_reqs=none")
    assert checked is not None and (checked.verify_mode, checked.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert unchecked is not None and unchecked.verify_mode == ssl.CERT_NONE
