"""Stores that are none, or are somebody else's."""

import asyncio
import math
import socket

import pytest
import redis.asyncio as redis

from resmgr import Invalid, NotAStore, ResourceManager, StoreMismatch, StoreUnavailable
from resmgr.embedded import EmbeddedServer


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


pytestmark = pytest.mark.real


async def test_nothing_listens(tmp_path):
    with pytest.raises(StoreUnavailable, match="nothing answers"):
        await ResourceManager.connect(f"unix://{tmp_path}/none.sock")


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", NotAStore, "check host and port"),
        (b"-ERR unknown command 'INFO'\r\n", NotAStore, "check its host, port and database"),
        (b"$12\r\nos:something\r\n", NotAStore, "runs version unknown"),
        (b"$19\r\nredis_version:6.2.1\r\n", NotAStore, "runs version 6.2.1"),
        (b":1\r\n", NotAStore, "runs version unknown"),
        (b"", NotAStore, "without a word"),
        (None, StoreUnavailable, "is it a Redis"),
        (b"-LOADING the dataset\r\n", StoreUnavailable, "is busy"),
        (b"-ERR max number of clients reached\r\n", StoreUnavailable, "is busy"),
        (b"-MASTERDOWN Link with MASTER is down\r\n", StoreUnavailable, "is busy"),
    ],
)
async def test_something_else_listens(answer, error, message):
    """None is a server that stays silent; nothing said is one that hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1000)
        writer.write(answer or b"")
        if answer is None:
            await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(error, match=message):
        await ResourceManager.connect(f"redis://127.0.0.1:{port}", io_timeout=1)
    server.close()
    await server.wait_closed()


async def test_credentials_are_needed_and_are_not_shown(tmp_path):
    server = EmbeddedServer(tmp_path)
    await server.ensure()
    async with redis.Redis.from_url(f"unix://{server.socket_path}") as client:
        await client.config_set("requirepass", "open sesame")
    port = free_port()
    async with redis.Redis.from_url(f"unix://:open%20sesame@{server.socket_path}") as client:
        await client.config_set("port", str(port))
    for url in (f"redis://127.0.0.1:{port}", f"redis://:secret@127.0.0.1:{port}"):
        with pytest.raises(StoreUnavailable, match="refuses us") as caught:
            await ResourceManager.connect(url)
        assert "secret" not in str(caught.value)
    async with await ResourceManager.connect(f"redis://:open%20sesame@127.0.0.1:{port}") as rm:
        assert (await rm.status()).bindings == ()
    await server.stop()


@pytest.mark.parametrize(
    "option",
    [
        {"ttl": 0},
        {"ttl": -1},
        {"ttl": math.nan},
        {"ttl": math.inf},
        {"ttl": "x"},
        {"ttl": 1e300},
        {"settle": -1},
        {"io_timeout": 0},
        {"patience": math.nan},
        {"patience": None},
    ],
)
async def test_times_that_mean_nothing_are_refused(place, option):
    (name,) = option
    with pytest.raises(Invalid, match=f"{name}=.* must be .* s"):
        await place.connect(**option)
    assert await place.raw("EXISTS", "leases") == 0


@pytest.mark.parametrize("namespace", ["", "}", "a b", "\udcff", None])
async def test_a_namespace_is_a_name(socket, namespace):
    with pytest.raises(Invalid, match="namespace="):
        await ResourceManager.connect(f"unix://{socket}", namespace=namespace)


async def test_keys_that_are_somebody_elses(place):
    await place.raw("SET", "meta", "theirs")
    with pytest.raises(StoreMismatch, match="use another namespace"):
        await place.connect()


async def test_a_user_who_may_not_load_functions(socket, place):
    await place.client.acl_setuser("reader", enabled=True, nopass=True, commands=["+info", "+fcall"], keys=["*"])
    await place.client.function_flush()
    with pytest.raises(NotAStore, match="the right to FUNCTION LOAD"):
        await ResourceManager.connect(f"unix://reader:x@{socket}")
    rm = await place.connect()
    await place.client.function_flush()
    assert (await rm.status()).bindings == ()


async def test_another_schema_version(place):
    await place.raw("HSET", "meta", "schema", 99)
    with pytest.raises(StoreMismatch, match="schema version 99, this package writes 2"):
        await place.connect()
    assert await place.raw("EXISTS", "leases") == 0


async def test_another_ttl_is_refused_while_others_live_and_taken_afterwards(place):
    first = await place.connect(ttl=2)
    with pytest.raises(StoreMismatch, match=r"run with 2.0 s; leave ttl out"):
        await place.connect(ttl=3)
    assert (await place.connect()).ttl == 2
    for manager in place.managers:
        await manager.close()
    assert (await place.connect(ttl=3)).ttl == 3
    assert first.stats().held == 0
