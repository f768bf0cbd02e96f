"""What the gateway's parser and connections do with bytes that are not one well-formed request after another."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.llmproxy.gateways import Connection, Setting, ask, raw, serving, until

from llmproxy.gateway import GatewayConfig
from llmproxy.gateway.client import Client
from llmproxy.standin import StandIn

pytestmark = pytest.mark.seconds

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-trajectory-id: t\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
GOOD = b'{"prompt": "abc", "max_tokens": 3}'

REFUSED = {
    "a length and chunks": HEAD + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and a length": HEAD + b"transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n0\r\n\r\n",
    "two lengths": HEAD + b"content-length: 3\r\ncontent-length: 3\r\n\r\nabc",
    "two different lengths": HEAD + b"content-length: 3\r\ncontent-length: 30\r\n\r\nabc",
    "a list of lengths": HEAD + b"content-length: 3, 3\r\n\r\nabc",
    "a signed length": HEAD + b"content-length: +3\r\n\r\nabc",
    "a huge length": HEAD + b"content-length: 99999999999999999999999\r\n\r\nabc",
    "an unknown coding": HEAD + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunked, but not last": HEAD + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "a space before a colon": HEAD + b"content-length : 3\r\n\r\nabc",
    "a folded header": HEAD + b"a: b\r\n c: d\r\ncontent-length: 3\r\n\r\nabc",
    "bare line feeds": b"POST /v1/completions HTTP/1.1\nhost: x\n\n",
    "a carriage return in a value": HEAD + b"a: b\rcontent-length: 3\r\n\r\n",
    "a NUL in a value": HEAD + b"a: b\x00c\r\n\r\n",
    "a control character in a value": HEAD + b"a: b\x01c\r\n\r\n",
    "a bad chunk size": CHUNKED + b"3x\r\nabc\r\n0\r\n\r\n",
    "a negative chunk size": CHUNKED + b"-3\r\nabc\r\n0\r\n\r\n",
    "a chunk longer than it says": CHUNKED + b"2\r\nabc\r\n0\r\n\r\n",
    "no HTTP at all": b"\x16\x03\x01\x02\x00\x01",
    "an old version": b"POST /v1/completions HTTP/1.0\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}",
    "another protocol": HEAD + b"connection: upgrade\r\nupgrade: h2c\r\ncontent-length: 2\r\n\r\n{}",
    "another protocol, no body": b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n",
    "a tunnel": b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a trajectory twice": HEAD + b"x-trajectory-id: u\r\ncontent-length: 2\r\n\r\n{}",
    "a trajectory that is not ASCII": b"POST /v1/completions HTTP/1.1\r\nx-trajectory-id: \xff\r\n\r\n",
    "a long trajectory": b"POST /v1/completions HTTP/1.1\r\nx-trajectory-id: " + b"t" * 300 + b"\r\n\r\n",
}


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED.keys())
async def test_what_is_not_one_request_reaches_no_worker(data: bytes) -> None:
    async with serving(server := StandIn()) as at, Connection(at.port) as client:
        client.writer.write(data)
        reply = await client.reply()
        assert reply.status in (400, 431, 505) and reply.error["type"] == "InvalidRequest" and reply.error["field"]
        assert await client.reader.read() == b""
        assert server.served == 0
        await until(at.idle)


async def test_a_smuggled_request_is_never_answered() -> None:
    inner = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"
    length = b"content-length: %d\r\ntransfer-encoding: chunked\r\n\r\n" % (5 + len(inner))
    async with serving(server := StandIn()) as at, Connection(at.port) as client:
        client.writer.write(HEAD + length + b"0\r\n\r\n" + inner)
        assert (await client.reply()).status == 400
        assert await client.reader.read() == b"" and server.served == 0


async def test_chunked_bodies_become_one_with_a_length() -> None:
    async with serving(StandIn()) as at, Connection(at.port) as client:
        client.writer.write(CHUNKED)
        for byte in GOOD:
            client.writer.write(b"1;note=x\r\n%c\r\n" % byte)
            await asyncio.sleep(0)
        client.writer.write(b"0\r\nx-trailer: ignored\r\n\r\n")
        assert (await client.reply()).json()["usage"]["completion_tokens"] == 3
        assert at.idle()


async def test_bytes_may_come_one_by_one() -> None:
    async with serving(StandIn()) as at, Connection(at.port) as client:
        for byte in HEAD + b"content-length: %d\r\n\r\n" % len(GOOD) + GOOD:
            client.writer.write(bytes([byte]))
            await asyncio.sleep(0)
        assert (await client.reply()).status == 200


async def test_a_client_that_asks_first_is_told_to_go_on() -> None:
    async with serving(StandIn()) as at, Connection(at.port) as client:
        client.writer.write(HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(GOOD))
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.writer.write(GOOD)
        assert (await client.reply()).status == 200


async def test_headers_for_one_hop_are_not_passed_on() -> None:
    seen: dict[str, str] = {}

    class Server(StandIn):
        async def answer(self, method, path, headers, body, writer) -> bool:
            seen.update(headers)
            return await super().answer(method, path, headers, body, writer)

    async with serving(Server()) as at:
        hop = {"connection": "keep-alive, X-Mine", "x_mine": "1", "keep_alive": "5", "proxy_authorization": "y"}
        await ask(at.port, "POST", "/v1/completions", GOOD, x_trajectory_id="t", x_other="2", **hop)
        assert seen["x-other"] == "2"
        assert not seen.keys() & {"x-mine", "keep-alive", "proxy-authorization", "connection"}


async def test_a_client_may_ask_for_the_end_of_its_connection() -> None:
    async with serving(StandIn()) as at, Connection(at.port) as client:
        client.send("POST", "/v1/completions", GOOD, connection="close", x_trajectory_id="t")
        reply = await client.reply()
        assert reply.status == 200 and reply.headers["connection"] == "close"
        assert await client.reader.read() == b""


LIMITED = GatewayConfig(max_body=1000, max_buffered=1500, max_head=2000, max_connections=3)


async def test_a_long_body_is_refused_before_it_comes() -> None:
    async with serving(server := StandIn(), config=LIMITED) as at:
        reply = await raw(at.port, HEAD + b"content-length: 100000000\r\n\r\n")
        assert (reply.status, reply.error["field"], reply.error["limit"]) == (413, "body", "at most 1000 bytes")
        reply = await raw(at.port, CHUNKED + b"3e8\r\n" + b"x" * 1000 + b"\r\n1\r\nx\r\n")
        assert (reply.status, reply.error["limit"]) == (413, "at most 1000 bytes")
        assert server.served == 0
        await until(at.idle)


async def test_the_default_limit_refuses_100_mb() -> None:
    async with serving(StandIn()) as at, Connection(at.port) as client:
        client.writer.write(HEAD + b"content-length: 100000000\r\n\r\n" + b"x" * 1_000_000)
        assert (await client.reply()).status == 413
        client.writer.write(b"x" * 1_000_000)  # goes nowhere, and harms nobody


async def test_bodies_held_at_one_time_are_bounded() -> None:
    async with serving(StandIn(), config=LIMITED) as at, Connection(at.port) as first:
        first.writer.write(HEAD + b"content-length: 900\r\n\r\n")
        await until(lambda: at.gateway.buffered == 900)
        reply = await raw(at.port, HEAD + b"content-length: 900\r\n\r\n")
        assert (reply.status, reply.error["type"]) == (503, "Overloaded")
        first.writer.close()
        await until(at.idle)


async def test_those_who_may_not_come_in_take_no_room() -> None:
    config = GatewayConfig(api_key="secret", max_body=1000, max_buffered=1000)
    async with serving(StandIn(), config=config) as at, Connection(at.port) as stranger:
        stranger.writer.write(HEAD + b"content-length: 1000\r\n\r\n")
        assert (await stranger.reply()).status == 401
        assert at.gateway.buffered == 0
        reply = await ask(at.port, "POST", "/v1/completions", GOOD, authorization="Bearer secret")
        assert reply.status == 200


@pytest.mark.parametrize(
    "data", [HEAD + b"a: " + b"x" * 3000, HEAD + b"a: b\r\n" * 500 + b"\r\n", b"GET /" + b"x" * 3000]
)
async def test_long_heads_are_refused(data: bytes) -> None:
    async with serving(StandIn(), config=LIMITED) as at:
        assert (await raw(at.port, data)).status == 431


async def test_connections_are_bounded() -> None:
    async with serving(StandIn(), config=LIMITED) as at:
        async with Connection(at.port), Connection(at.port), Connection(at.port):
            await until(lambda: at.gateway.connections == 3)
            async with Connection(at.port) as fourth:
                assert (await fourth.reply()).error["limit"] == "at most 3 connections"
        await until(lambda: at.gateway.connections == 0)
        assert (await ask(at.port, "GET", "/health")).status == 200


async def test_half_open_clients_time_out() -> None:
    config = GatewayConfig(head_timeout=0.1, body_timeout=0.1, idle_timeout=0.1)
    async with serving(StandIn(), config=config) as at, Connection(at.port) as silent, Connection(at.port) as idle:
        assert await silent.reader.read() == b""
        head = await raw(at.port, HEAD)
        assert (head.status, head.error["type"]) == (408, "Timeout")
        body = await raw(at.port, HEAD + b"content-length: 10\r\n\r\nabc")
        assert (body.status, body.error["type"]) == (408, "Timeout")
        with pytest.raises(ConnectionError):
            idle.send("GET", "/health")
            await idle.reply()
            raise ConnectionResetError
        await until(lambda: at.gateway.connections == 0)
        assert at.idle()


async def test_answers_take_no_longer_than_they_may() -> None:
    async with serving(StandIn(delay=30.0), config=GatewayConfig(request_timeout=0.1)) as at:
        reply = await ask(at.port, "POST", "/v1/completions", GOOD, x_trajectory_id="t")
        assert (reply.status, reply.error["type"]) == (504, "Timeout")
        assert at.idle()
        await until(lambda: not at.servers[0].running)


async def test_a_client_that_reads_in_fits_and_starts_gets_no_more_time() -> None:
    config = GatewayConfig(request_timeout=1.2)
    async with serving(StandIn(delay=30.0), config=config) as at, Connection(at.port) as client:
        client.send("POST", "/v1/completions", GOOD, x_trajectory_id="t")
        await until(lambda: at.gateway.exchanges)
        connection = await _first_client(at)
        while at.gateway.exchanges:
            connection.pause_writing()
            connection.resume_writing()
            await asyncio.sleep(0.1)
        assert (await client.reply()).status == 504


async def test_a_client_that_does_not_read_is_cut_off_and_holds_nothing() -> None:
    class Flood(StandIn):
        async def answer(self, method, path, headers, body, writer) -> bool:
            if not path.startswith("/v1/comp"):
                return await super().answer(method, path, headers, body, writer)
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            while True:
                writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
                await writer.drain()

    async with serving(Flood(), config=GatewayConfig(stall_timeout=0.2)) as at, Connection(at.port) as client:
        client.send("POST", "/v1/completions", GOOD, x_trajectory_id="t")
        await until(lambda: at.gateway.exchanges)
        await until(at.idle)
        assert at.gateway.metrics.truncated + at.gateway.metrics.disconnects == 1


@pytest.mark.parametrize(
    "start", [CHUNKED + b"2\r\n{}\r\n0\r\nx-trailer: ", CHUNKED + b"2;note="], ids=["a trailer", "an extension"]
)
async def test_what_is_around_a_body_is_bounded_too(start: bytes) -> None:
    async with serving(StandIn(), config=LIMITED) as at, Connection(at.port) as client:
        client.writer.write(start)
        for _ in range(5):
            client.writer.write(b"x" * 1000)
            await asyncio.sleep(0.01)  # so that it is read in pieces
        assert (await client.reply()).status == 431
        await until(at.idle)


async def test_many_small_pieces_are_kept_as_few() -> None:
    async with serving(StandIn()) as at, Connection(at.port) as client:
        text = b"ab" * 10_000
        client.writer.write(CHUNKED + b'b\r\n{"prompt":"\r\n' + b"2\r\nab\r\n" * 10_000)
        await until(lambda: at.gateway.buffered == 11 + len(text))
        (connection,) = at.gateway._clients
        assert len(connection._pieces) <= len(text) // 4096 + 2
        client.writer.write(b'12\r\n","max_tokens": 3}\r\n0\r\n\r\n')
        assert (await client.reply()).json()["usage"]["prompt_tokens"] == len(text)


async def test_a_long_body_before_a_head_does_not_count_as_head() -> None:
    body = b'{"prompt": "%b", "max_tokens": 1}' % (b"x" * 3000)
    config = GatewayConfig(max_head=2000)
    async with serving(StandIn(), config=config) as at, Connection(at.port) as client:
        client.writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body + HEAD)
        assert (await client.reply()).status == 200
        client.writer.write(b"content-length: %d\r\n\r\n" % len(GOOD) + GOOD)
        assert (await client.reply()).status == 200


async def test_a_client_that_reads_no_answers_gets_no_more_of_them() -> None:
    ask_again = b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n"
    async with serving(StandIn()) as at, Connection(at.port) as client:
        connection = await _first_client(at)
        connection.pause_writing()  # as the transport does when what was written is not taken
        client.writer.write(ask_again * 3)
        await until(lambda: len(connection._queue) == 3)
        assert connection.answering is None
        connection.resume_writing()
        for _ in range(3):
            assert (await client.reply()).status == 200
        connection.pause_writing()
        client.writer.write(ask_again * 50)  # more than may wait: nothing further is read
        await until(lambda: connection._deaf)
        connection.resume_writing()
        answers = [(await client.reply()).status for _ in range(9)]
        assert answers == [200] * 8 + [0]


async def _first_client(at: Setting) -> Client:
    await until(lambda: at.gateway._clients)
    return next(iter(at.gateway._clients))


async def test_a_client_that_reads_nothing_is_cut_off_whatever_it_sends() -> None:
    async with serving(StandIn(), config=GatewayConfig(stall_timeout=0.2)) as at, Connection(at.port) as client:
        connection = await _first_client(at)
        connection.pause_writing()
        client.send("GET", "/metrics")
        await until(lambda: at.gateway.connections == 0)


async def test_an_answer_to_head_has_no_body() -> None:
    async with serving(StandIn()) as at, Connection(at.port) as client:
        client.writer.write(b"HEAD /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b" 405 " in await client.reader.readuntil(b"\r\n\r\n")
        client.send("GET", "/health")
        assert (await client.reply()).status == 200


@settings(max_examples=25)
@given(st.lists(st.sampled_from([True, False]), min_size=1, max_size=6), st.lists(st.integers(1, 200), max_size=12))
def test_where_bytes_are_cut_makes_no_difference(chunked: list[bool], cuts: list[int]) -> None:
    """Requests with a length or in chunks, sent ahead of each other and cut anywhere, are answered in order."""
    data = b""
    for n, in_chunks in enumerate(chunked):
        body = b'{"prompt": "abc", "max_tokens": %d}' % (n + 1)
        framed = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if in_chunks else body
        length = b"transfer-encoding: chunked" if in_chunks else b"content-length: %d" % len(body)
        data += b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n%b\r\n\r\n%b" % (length, framed)

    async def run() -> None:
        async with serving(StandIn()) as at, Connection(at.port) as client:
            rest = data
            for cut in cuts:
                client.writer.write(rest[:cut])
                rest = rest[cut:]
                await asyncio.sleep(0)
            client.writer.write(rest)
            for n in range(len(chunked)):
                assert (await client.reply()).json()["usage"]["completion_tokens"] <= n + 1
            assert at.servers[0].served == len(chunked) and at.idle()

    asyncio.run(run())
