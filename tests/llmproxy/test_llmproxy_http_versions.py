"""HTTPWorker says of every token which weights made it, though servers tell that with the last event alone."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace
from tests.llmproxy.gateways import expected, until
from tests.llmproxy.test_llmproxy_gateway_admin import Loader
from tests.llmproxy.test_llmproxy_http_worker import REQUEST, Silent, working

from llmproxy import Partial, Span, WorkerLost
from llmproxy.dialects import VLLM
from llmproxy.http_stream import Stream
from llmproxy.http_worker import HTTPWorker
from llmproxy.standin import StandIn, send

LONG = replace(REQUEST, max_tokens=5_000)


async def made(server: StandIn, tokens: int) -> int:
    """Wait until the server made so many; how many it made."""
    await until(lambda: any(len(one.versions) >= tokens for one in server.running.values()))
    return len(next(iter(server.running.values())).versions)


async def test_a_generation_that_is_cut_short_after_an_update() -> None:
    async with working(server := StandIn(delay=0.005), loader=Loader()) as worker:
        running = asyncio.create_task(worker.generate(LONG))
        await made(server, 5)
        await worker.update(1)
        old = await made(server, 5)
        await worker.resume()
        await made(server, old + 5)
        await server.close()
        with pytest.raises(WorkerLost) as lost:
            await running
        partial = lost.value.partial
        assert partial is not None and len(partial.token_ids) >= old + 4
        assert partial.spans == [Span(0, 0, old), Span(1, old, len(partial.token_ids))]
        before = expected([1, 2, 3], old)
        after = expected([1, 2, 3, *before], len(partial.token_ids) - old, version=1)
        assert partial.token_ids == before + after


async def test_a_server_that_falls_silent_after_an_update() -> None:
    async with working(server := Silent(0.005), loader=Loader(), watch=0.02, silence=0.1) as worker:
        await worker.update(1)
        await worker.resume()
        running = asyncio.create_task(worker.generate(LONG))
        await made(server, 5)
        server.speaks.clear()
        with pytest.raises(WorkerLost, match="no sign of life") as lost:
            await running
        partial = lost.value.partial
        assert partial is not None and partial.spans == [Span(1, 0, len(partial.token_ids))]
        server.speaks.set()


async def test_a_server_that_has_no_way_to_abort_hands_back_what_arrived() -> None:
    class Plain(StandIn):
        async def answer(self, method, path, headers, body, writer) -> bool:
            if "abort" in path:
                send(writer, {"detail": "Not Found"}, 404)
                return True
            return await super().answer(method, path, headers, body, writer)

    async with working(server := Plain(delay=0.005)) as worker:
        running = asyncio.create_task(worker.generate(LONG))
        await made(server, 5)
        await worker.interrupt("r")
        partial = await running
        assert isinstance(partial, Partial) and len(partial.token_ids) >= 4
        assert partial.token_ids == expected([1, 2, 3], len(partial.token_ids))
        await until(lambda: not server.running)


async def test_the_start_of_a_server_that_takes_requests_and_never_answers() -> None:
    server = Silent(0.0)
    server.speaks.clear()
    worker = HTTPWorker(f"http://127.0.0.1:{await server.start()}", silence=0.05)
    with pytest.raises(WorkerLost, match="gave no answer"):
        await worker.start()
    await worker.close()
    await server.close()


async def test_what_ended_whole_is_not_lost_afterwards() -> None:
    stream = Stream(VLLM(), "r", 0)
    stream.status = 200
    stream.on_body(b"data: [DONE]\n\n")
    stream.on_end()
    stream.on_lost("fell silent in the moment between")
    assert stream.failure == ""
