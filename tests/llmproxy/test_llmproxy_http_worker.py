"""HTTPWorker over servers that answer, refuse, fall silent, and end before they have ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace
from tests.llmproxy.faulty import Faulty
from tests.llmproxy.gateways import QUICK, expected, until
from tests.llmproxy.test_llmproxy_gateway_admin import Loader

from llmproxy import (
    Aborted,
    Ack,
    GenerateRequest,
    GenerateResult,
    InvalidRequest,
    LLMProxy,
    Partial,
    Sampling,
    Span,
    UpdateFailed,
    WorkerLost,
)
from llmproxy.dialects import OpenAI, SGLang
from llmproxy.http_worker import HTTPWorker
from llmproxy.standin import StandIn, send, send_event, send_head

FREE = Sampling(ignore_eos=True)
REQUEST = GenerateRequest("t", [1, 2, 3], 12, sampling=FREE, request_id="r")


class Silent(StandIn):
    """Says nothing while `speaks` is not set."""

    def __init__(self, delay: float) -> None:
        super().__init__(delay=delay)
        self.speaks = asyncio.Event()
        self.speaks.set()

    async def answer(self, method, path, headers, body, writer) -> bool:
        await self.speaks.wait()
        return await super().answer(method, path, headers, body, writer)

    async def _wait(self, aborted: asyncio.Event) -> None:
        await self.speaks.wait()
        await super()._wait(aborted)


@asynccontextmanager
async def working(server: StandIn, **options: Any) -> AsyncIterator[HTTPWorker]:
    port = await server.start()
    worker = HTTPWorker(f"http://127.0.0.1:{port}/", id="w", **options)
    await worker.start()
    try:
        yield worker
    finally:
        await worker.close()
        worker.pool.abort()
        await server.close()


async def test_generate() -> None:
    async with working(StandIn(context_limit=500)) as worker:
        assert (worker.context_limit, worker.version) == (500, 0)
        result = await worker.generate(REQUEST)
        assert isinstance(result, GenerateResult)
        assert result.token_ids == expected([1, 2, 3], 12) and len(result.logprobs) == 12
        assert (result.spans, result.finish_reason, result.worker) == ([Span(0, 0, 12)], "length", "w")


async def test_interrupt_keeps_what_was_made_and_another_call_goes_on() -> None:
    async with working(server := StandIn(delay=0.005)) as worker:
        running = asyncio.create_task(worker.generate(replace(REQUEST, max_tokens=40)))
        await until(lambda: any(len(one.versions) > 4 for one in server.running.values()))
        await worker.interrupt("r")
        partial = await running
        assert isinstance(partial, Partial) and not server.running
        assert len(partial.token_ids) >= 4 and len(partial.token_ids) + partial.remaining == 40
        server.delay = 0.0
        result = await worker.generate(replace(REQUEST, max_tokens=40, resume=partial))
        assert result.token_ids == expected([1, 2, 3], 40) and len(result.logprobs) == 40


@pytest.mark.seconds
async def test_interrupt_of_a_server_that_does_not_answer_still_returns_the_partial() -> None:
    class Deaf(StandIn):
        async def answer(self, method, path, headers, body, writer) -> bool:
            if "abort" in path:
                await asyncio.sleep(30)
            return await super().answer(method, path, headers, body, writer)

    async with working(server := Deaf(delay=0.005)) as worker:
        running = asyncio.create_task(worker.generate(replace(REQUEST, max_tokens=5000)))
        await until(lambda: any(len(one.versions) > 4 for one in server.running.values()))
        await worker.interrupt("r")
        partial = await running
        assert isinstance(partial, Partial) and partial.token_ids == expected([1, 2, 3], len(partial.token_ids))
        await until(lambda: not server.running)  # closing the connection ended it there


async def test_abort() -> None:
    async with working(server := StandIn(delay=0.005)) as worker:
        running = asyncio.create_task(worker.generate(replace(REQUEST, max_tokens=5000)))
        await until(lambda: server.running)
        await worker.abort("r")
        with pytest.raises(Aborted):
            await running
        await worker.abort("nobody")


async def test_cancelling_frees_the_servers_request() -> None:
    async with working(server := StandIn(delay=0.005)) as worker:
        running = asyncio.create_task(worker.generate(replace(REQUEST, max_tokens=5000)))
        await until(lambda: server.running)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await until(lambda: not server.running)


async def test_an_update_between_two_tokens() -> None:
    async with working(server := StandIn(delay=0.005), loader=Loader()) as worker:
        running = asyncio.create_task(worker.generate(replace(REQUEST, max_tokens=30)))
        await until(lambda: any(len(one.versions) > 4 for one in server.running.values()))
        assert await worker.update(1) == Ack("w", 1, "digest-1")
        made = len(next(iter(server.running.values())).versions)
        await asyncio.sleep(0.03)
        assert len(next(iter(server.running.values())).versions) == made  # paused
        await worker.resume()
        result = await running
        assert isinstance(result, GenerateResult)
        assert result.spans == [Span(0, 0, made), Span(1, made, 30)] and await worker.probe() == 1


async def test_an_update_that_others_load_must_show_in_the_server() -> None:
    async with working(server := StandIn()) as worker:
        with pytest.raises(UpdateFailed, match="the server holds 0"):
            await worker.update(1)
        assert worker.version is None
        server.version = 1
        assert (await worker.update(1)).version == 1 == worker.version


async def test_an_update_that_fails_leaves_no_certain_version() -> None:
    async with working(StandIn(), loader=Loader(failing="w")) as worker:
        with pytest.raises(UpdateFailed, match="disk full"):
            await worker.update(1)
        assert worker.version is None and await worker.probe() == 0


@pytest.mark.parametrize("kind", ["truncate", "half", "drop", "500", "garbage", "half whole", "unclosed"])
async def test_what_does_not_end_well_is_lost_and_never_finished(kind: str) -> None:
    server = Faulty()
    async with working(server) as worker:
        server.kind, server.left = kind, 2 if kind == "drop" else 1  # a connection that ends unused is tried anew
        with pytest.raises(WorkerLost) as lost:
            await worker.generate(REQUEST)
        assert lost.value.worker == "w"
        assert isinstance(await worker.generate(REQUEST), GenerateResult)


async def test_what_arrived_before_a_loss_is_kept() -> None:
    class Cut(StandIn):
        """Sends 10 tokens, then closes."""

        async def answer(self, method, path, headers, body, writer) -> bool:
            if path != "/inference/v1/generate" or self.served:
                return await super().answer(method, path, headers, body, writer)
            self.served = 1
            send_head(writer)
            for token in expected([1, 2, 3], 10):
                content = [{"token_id": token, "logprob": -1.0}]
                send_event(
                    writer, {"choices": [{"index": 0, "token_ids": [token], "logprobs": {"content": content}}]}
                )
            await writer.drain()
            return False

    async with working(Cut()) as worker:
        with pytest.raises(WorkerLost) as lost:
            await worker.generate(REQUEST)
        assert lost.value.partial == Partial(expected([1, 2, 3], 10), [-1.0] * 10, [Span(0, 0, 10)], 2)
        whole = await worker.generate(replace(REQUEST, resume=lost.value.partial))
        assert whole.token_ids == expected([1, 2, 3], 12)


async def test_4xx_is_the_callers() -> None:
    server = Faulty()
    async with working(server) as worker:
        server.kind, server.left = "400", 30
        for _ in range(30):
            with pytest.raises(InvalidRequest, match="it: was answered 400: on purpose"):
                await worker.generate(REQUEST)
        proxy = LLMProxy([worker], config=QUICK)
        server.left = 5
        for _ in range(5):
            with pytest.raises(InvalidRequest):
                await proxy.generate(REQUEST)
        assert not proxy.stats().workers[0].fenced
        await proxy.close()


@pytest.mark.parametrize(("code", "raised"), [(400, InvalidRequest), (500, WorkerLost)])
async def test_an_error_in_a_stream(code: int, raised: type[Exception]) -> None:
    class Late(StandIn):
        async def answer(self, method, path, headers, body, writer) -> bool:
            if path != "/inference/v1/generate":
                return await super().answer(method, path, headers, body, writer)
            send_head(writer)
            send_event(writer, {"error": {"message": "token id 5000 is out", "param": "token_ids", "code": code}})
            send_event(writer, b"[DONE]")
            writer.write(b"0\r\n\r\n")
            return True

    async with working(Late()) as worker:
        with pytest.raises(raised, match="token id 5000 is out"):
            await worker.generate(REQUEST)


async def test_a_server_that_falls_silent_is_noticed_and_what_runs_there_moves() -> None:
    first, second = Silent(delay=0.005), StandIn()
    async with working(first, watch=0.02, silence=0.1) as worker, working(second) as other:
        other.id = "other"
        proxy = LLMProxy([worker], config=QUICK)
        running = asyncio.create_task(proxy.generate(replace(REQUEST, max_tokens=40)))
        await until(lambda: any(len(one.versions) > 4 for one in first.running.values()))
        first.speaks.clear()
        proxy.add_worker(other)
        result = await running
        assert result.token_ids == expected([1, 2, 3], 40) and result.worker == "other"
        assert "no sign of life" in proxy.stats().workers[0].fenced
        first.speaks.set()
        await until(lambda: not proxy.stats().workers[0].fenced)
        await proxy.close()


async def test_another_server_at_the_same_place_must_prove_its_version() -> None:
    server = StandIn()
    port = await server.start()
    worker = HTTPWorker(f"http://127.0.0.1:{port}", id="w", watch=30.0, loader=Loader())
    await worker.start()
    await worker.update(2)
    await worker.resume()
    lost: list[str] = []
    worker.on_lost = lost.append
    await until(lambda: len(worker._life.pool.idle) == 1)
    await server.close()
    other = StandIn()
    await other.start(port=port)
    await until(lambda: lost)
    assert worker.version is None
    await until(lambda: "cannot connect" in lost[0] or "version 0" in lost[0])
    assert await worker.probe() == 0
    await worker.close()
    worker.pool.abort()
    await other.close()


async def test_connections_are_kept_and_shared() -> None:
    async with working(StandIn()) as worker:
        for _ in range(5):
            await worker.generate(REQUEST)
        assert len(worker.pool) == 1
        await asyncio.gather(*(worker.generate(replace(REQUEST, request_id=f"r{n}")) for n in range(4)))
        assert len(worker.pool) == 4


async def test_start_of_nothing() -> None:
    with pytest.raises(WorkerLost, match=r"worker 127.0.0.1:1 is lost: cannot connect"):
        await HTTPWorker("http://127.0.0.1:1").start()
    with pytest.raises(ValueError, match="is not an http"):
        HTTPWorker("127.0.0.1:8000")


@pytest.mark.parametrize("told", [{"weight_version": "latest"}, {}, {"weight_version": None}])
async def test_a_version_that_is_no_number_is_none(told: dict[str, Any]) -> None:
    class Odd(StandIn):
        async def answer(self, method, path, headers, body, writer) -> bool:
            if path == "/weight_info":
                send(writer, told)
                return True
            return await super().answer(method, path, headers, body, writer)

    server = Odd()
    worker = HTTPWorker(f"http://127.0.0.1:{await server.start()}", id="w")
    with pytest.raises(WorkerLost, match="which is no number"):
        await worker.start()
    await worker.close()
    worker.pool.abort()
    await server.close()


async def test_sampling_that_changes_the_distribution_needs_a_server_that_reports_it() -> None:
    hot = replace(REQUEST, sampling=Sampling(temperature=0.5, logprobs="processed", ignore_eos=True))
    async with working(StandIn()) as worker:
        with pytest.raises(InvalidRequest, match="--logprobs-mode"):
            await worker.generate(hot)
    async with working(StandIn(), processed_logprobs=True) as worker:
        assert isinstance(await worker.generate(hot), GenerateResult)


async def test_openai_dialect_starts_again_elsewhere_what_it_cannot_hold() -> None:
    async with working(server := StandIn(delay=0.005), dialect=OpenAI()) as worker:
        proxy = LLMProxy([worker], config=QUICK)
        running = asyncio.create_task(proxy.generate(replace(REQUEST, max_tokens=40)))
        await until(lambda: any(len(one.versions) > 4 for one in server.running.values()))
        await proxy.suspend()
        await until(lambda: not server.running)
        await proxy.resume()
        result = await running
        assert result.token_ids == expected([1, 2, 3], 40) and len(result.logprobs) == 40
        assert result.timing.attempts >= 2
        await proxy.close()


class SGLangServer(StandIn):
    """`/generate` and the controls as SGLang's documentation has them: every event tells all tokens so far."""

    paused = False

    async def answer(self, method, path, headers, body, writer) -> bool:
        import msgspec

        asked = msgspec.json.decode(body) if body else {}
        match path:
            case "/get_weight_version":
                send(writer, {"weight_version": "default" if self.version == 0 else str(self.version)})
            case "/pause_generation" | "/flush_cache" | "/continue_generation":
                self.paused = path != "/continue_generation"
                send(writer, {})
            case "/update_weight_version":
                self.version = int(asked["new_version"])
                send(writer, {})
            case "/generate":
                parameters = asked["sampling_params"]
                send_head(writer)
                made: list[int] = []
                for token in expected(asked["input_ids"], parameters["max_new_tokens"], self.version):
                    made.append(token)
                    done = len(made) == parameters["max_new_tokens"]
                    meta = {
                        "id": asked["rid"],
                        "output_token_logprobs": [[-0.5, one, None] for one in made],
                        "finish_reason": {"type": "length", "length": len(made)} if done else None,
                        "weight_version": "default" if self.version == 0 else str(self.version),
                        "cached_tokens": 2,
                    }
                    send_event(writer, {"text": "", "meta_info": meta})
                send_event(writer, b"[DONE]")
                writer.write(b"0\r\n\r\n")
            case _:
                return await super().answer(method, path, headers, body, writer)
        return True


async def test_sglang_dialect() -> None:
    async with working(server := SGLangServer(), dialect=SGLang(), loader=Loader()) as worker:
        result = await worker.generate(REQUEST)
        assert isinstance(result, GenerateResult)
        assert result.token_ids == expected([1, 2, 3], 12) and result.logprobs == [-0.5] * 12
        assert result.spans == [Span(0, 0, 12)] and result.timing.cached_tokens == 2
        await worker.update(3)
        assert server.paused
        await worker.resume()
        assert (await worker.generate(REQUEST)).spans == [Span(3, 0, 12)] and await worker.probe() == 3


async def test_it_works_under_the_proxy_like_any_worker() -> None:
    async with working(StandIn(), loader=Loader()) as one, working(StandIn(), loader=Loader()) as two:
        two.id = "w2"
        proxy = LLMProxy([one, two], config=QUICK)
        requests = [replace(REQUEST, trajectory_id=f"t{n}", request_id=f"r{n}") for n in range(20)]
        results = await asyncio.gather(*(proxy.generate(request) for request in requests))
        assert {result.worker for result in results} == {"w", "w2"}
        await proxy.suspend()
        assert [ack.version for ack in await proxy.update(1)] == [1, 1]
        await proxy.resume()
        assert (await proxy.generate(REQUEST)).token_ids == expected([1, 2, 3], 12, version=1)
        await proxy.close()
