"""Endpoints as pools of concurrency: bound against, spread, lost with their endpoint and back with it."""

import asyncio
from typing import Any

import pytest

from resmgr import Binding, Infeasible, Invalid, Pool, Request
from resmgr.serverless import Endpoint, ServerlessBackend, answers

pytestmark = pytest.mark.real

A = Endpoint("a", "http://a.example/score", 4, "judge")
B = Endpoint("b", "http://b.example/score", 8, "judge")


async def test_concurrency_is_the_capacity(place):
    rm = await place.connect()
    async with ServerlessBackend(rm, [A, B]) as backend:
        large = await rm.bind(Request("reward", prefer=["judge"], amount=10), timeout=0)
        assert backend.urls(large) == {B.url: 8, A.url: 2}
        waiting = asyncio.create_task(rm.bind(Request("reward", prefer=["judge"], amount=4)))
        await rm.bind(Request("reward", prefer=["judge"], amount=2), timeout=0)
        await rm.release(large)
        assert sum(backend.urls(await waiting).values()) == 4
        with pytest.raises(Infeasible, match="12 would fit"):
            await rm.bind(Request("reward", prefer=["judge"], amount=13))
        assert {p.backend for p in (await rm.status()).pools} == {"serverless"}


async def test_an_endpoint_that_is_gone_moves_its_bindings_and_returns_with_its_first_answer(place):
    up = {"a": True, "b": True}

    async def probe(endpoint: Endpoint) -> bool:
        return up[endpoint.name]

    moved: asyncio.Queue[tuple[Binding, Binding | None]] = asyncio.Queue()
    rm = await place.connect()
    async with ServerlessBackend(rm, [A, B], probe=probe, interval=3600) as backend:
        binding = await rm.bind(Request("x", prefer=["judge"], amount=4), 0, lambda *pair: moved.put_nowait(pair))
        assert backend.urls(binding) == {A.url: 4}
        up["a"] = False
        await backend.refresh()
        await backend.refresh()
        await rm.check(binding)
        await backend.refresh()
        lost, new = await moved.get()
        assert lost == binding and new is not None and backend.urls(new) == {B.url: 4}
        up["a"] = True
        await backend.refresh()
        assert sum(p.total for p in (await rm.status()).pools) == 12


async def test_a_probe_that_raises_has_had_no_answer(place, caplog):
    async def probe(endpoint: Endpoint) -> bool:
        if endpoint.name == "a":
            raise ConnectionRefusedError("nobody there")
        return True

    rm = await place.connect()
    async with ServerlessBackend(rm, [A, B], probe=probe, interval=3600) as backend:
        for _ in range(3):
            await backend.refresh()
        assert sum(p.total for p in (await rm.status()).pools) == 8
    assert "endpoint a: its probe raised ConnectionRefusedError('nobody there')" in caplog.text


async def test_a_probe_reads_the_health_of_the_host():
    answer = b"HTTP/1.1 200 OK\r\n\r\n"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    endpoint = Endpoint("a", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/f", 1)
    async with server:
        assert await answers(endpoint)
        answer = b"HTTP/1.1 503 Busy\r\n\r\n"
        assert not await answers(endpoint)
    assert not await answers(endpoint)


@pytest.mark.parametrize("said", [b"", b"x" * 200_000, b"SSH-2.0-x\r\n", b"\r\n", b"HTTP/1.1\r\n"])
async def test_what_is_no_answer_is_a_host_that_is_down(said):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert not await answers(Endpoint("a", f"http://127.0.0.1:{port}/f", 1))
        assert not await answers(Endpoint("a", f"https://127.0.0.1:{port}/f", 1))


@pytest.mark.parametrize(
    "url", ["http://", "http://a:b/", "http://[::1", "http://" + "ä" * 70, "http://a\0b/", "http://a..b"]
)
async def test_a_url_that_leads_nowhere_is_a_host_that_is_down(url):
    assert not await answers(Endpoint("a", url, 1))


async def test_a_binding_of_another_pool_has_no_urls(place):
    rm = await place.connect()
    await rm.register(Pool("other", hardware="H800", total=1))
    async with ServerlessBackend(rm, [A]) as backend:
        with pytest.raises(Invalid, match="on 'other', which is none of our endpoints"):
            backend.urls(await rm.bind(Request("x", prefer=["H800"]), timeout=0))


WRONG: list[Any] = [("x y", A.url, 1), ("x", None, 1), ("x", A.url, 0), ("x", A.url, 1.5)]


@pytest.mark.parametrize("wrong", [*(Endpoint(*fields) for fields in WRONG), None])
async def test_wrong_endpoints_are_refused(place, wrong):
    with pytest.raises(Invalid, match=r"[Ee]ndpoint"):
        ServerlessBackend(await place.connect(), [wrong])


async def test_endpoints_that_mean_nothing_are_refused(place):
    rm = await place.connect()
    with pytest.raises(Invalid, match="different names"):
        ServerlessBackend(rm, [A, A])
    with pytest.raises(Invalid, match="must begin with http"):
        ServerlessBackend(rm, [Endpoint("x", "ftp://x", 1)])
