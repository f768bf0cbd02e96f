"""A vLLM server over HTTP, played by a few lines: what it answers, and what becomes of no answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from weightsync import EngineRefused
from weightsync.vllm_http import HTTPEngine


def http(status: str, body: str) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


@asynccontextmanager
async def serving(answer: bytes) -> AsyncIterator[HTTPEngine]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield HTTPEngine(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", timeout=10)


async def test_a_call_goes_straight_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever proxy the environment names for the world outside."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    async with serving(http("200 OK", '{"results": [[1, "d", ""]]}')) as engine:
        assert await engine.collective_rpc("weightsync_state") == [[1, "d", ""]]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "does not answer"),
        (http("200 OK", "hello"), "does not answer"),
        (http("200 OK", "[1]")[:-1], "does not answer"),
        (http("500 Oops", "broken"), "answered 500: broken"),
    ],
)
async def test_a_server_that_gives_no_good_answer_has_refused(answer: bytes, message: str) -> None:
    async with serving(answer) as engine:
        with pytest.raises(EngineRefused, match=message):
            async with engine.paused():
                raise AssertionError("nothing is loaded")
