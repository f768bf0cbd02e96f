"""The gateway over stand-in servers: what passes, where it goes, and that nothing is left behind."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import msgspec
import pytest
from tests.llmproxy.gateways import Connection, Setting, ask, expected, serving, until

from llmproxy.gateway import GatewayConfig
from llmproxy.standin import StandIn

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 6, "ignore_eos": True},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6},
    "/inference/v1/generate": {
        "token_ids": [1, 2, 3],
        "sampling_params": {"max_tokens": 6, "ignore_eos": True, "logprobs": 0},
    },
}


class Echo(StandIn):
    """Answers with the bytes that it was sent."""

    seen: tuple[str, dict[str, str], bytes] = ("", {}, b"")

    async def answer(
        self, method: str, path: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter
    ) -> bool:
        if not path.startswith("/v1/completions"):
            return await super().answer(method, path, headers, body, writer)
        self.seen = (path, headers, body)
        writer.write(b"HTTP/1.1 200 Fine\r\nx-odd: \xe9\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        return True


@pytest.mark.parametrize("named", [True, False])
async def test_bytes_pass_as_they_are(named: bool) -> None:
    body = b'{ "prompt" :\t"x",  "unknown":{"deep":[1e400,"\\u00e9", 1.10]},"max_tokens":3}\r\n'
    async with serving(server := Echo()) as at:
        headers = {"x_trajectory_id": "t"} if named else {}
        reply = await ask(at.port, "POST", "/v1/completions?a=1", body, x_own="kept", te="trailers", **headers)
        assert (reply.status, reply.body) == (200, body)
        assert reply.headers["x-odd"] == "\xe9"
        path, sent, got = server.seen
        assert (path, got) == ("/v1/completions", body)
        assert sent["x-own"] == "kept" and "te" not in sent and sent["x-request-id"] == reply.headers["x-request-id"]
        assert at.idle()


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("named", [False, True])
async def test_endpoints(path: str, stream: bool, named: bool) -> None:
    async with serving(StandIn()) as at:
        headers = {"x_trajectory_id": "t-1"} if named else {}
        reply = await ask(at.port, "POST", path, BODIES[path] | {"stream": stream}, **headers)
        assert reply.status == 200 and reply.whole
        assert reply.headers["x-llmproxy-worker"] == "w0"
        assert reply.headers["x-llmproxy-version"] == "0"
        assert reply.headers.get("x-trajectory-id") == ("t-1" if named else None)
        if stream:
            events = [event for event in reply.body.split(b"\n\n") if event]
            assert events[-1] == b"data: [DONE]" and len(events) > 2
        else:
            assert reply.json()["choices"][0]["finish_reason"] in ("length", "stop")
        if path == "/inference/v1/generate" and not stream:
            assert reply.json()["choices"][0]["token_ids"] == expected([1, 2, 3], 6)
        assert at.idle()


async def test_a_stream_arrives_event_by_event() -> None:
    async with serving(StandIn(delay=0.02)) as at, Connection(at.port) as client:
        client.send("POST", "/v1/completions", BODIES["/v1/completions"] | {"stream": True}, x_trajectory_id="t")
        chunks: list[bytes] = []
        reply = await client.reply(chunks.append)
        assert reply.whole and 6 <= len(chunks) <= 7 and at.gateway.metrics.chunks == len(chunks)


async def test_a_trajectory_stays_and_new_ones_spread() -> None:
    async with serving(*(StandIn() for _ in range(4))) as at:
        firsts = await asyncio.gather(*(turn(at, f"t{n}") for n in range(64)))
        assert min(Counter(firsts).values()) >= 4 and len(set(firsts)) == 4
        for _ in range(3):
            assert await asyncio.gather(*(turn(at, f"t{n}") for n in range(64))) == firsts
        assert at.proxy.stats().router["stayed"] == 3 * 64
        assert at.idle()


async def test_equal_id_prompts_spread() -> None:
    async with serving(*(StandIn(delay=0.01) for _ in range(4))) as at:
        body = {"token_ids": [5] * 100, "sampling_params": {"max_tokens": 3}}
        replies = await asyncio.gather(*(ask(at.port, "POST", "/inference/v1/generate", body) for _ in range(40)))
        assert len({reply.headers["x-llmproxy-worker"] for reply in replies}) == 4


@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_find_the_worker_that_holds_them(stream: bool) -> None:
    async with serving(*(StandIn() for _ in range(4))) as at:
        for n in range(12):
            context, workers = [n, n + 1, n + 2], set()
            for _ in range(4):  # nothing names the trajectory
                parameters = {"max_tokens": 70, "ignore_eos": True}
                body = {"token_ids": context, "sampling_params": parameters, "stream": stream}
                reply = await ask(at.port, "POST", "/inference/v1/generate", body)
                workers.add(reply.headers["x-llmproxy-worker"])
                context = context + expected(context, 70) + [5, 6]
            assert len(workers) == 1
        assert at.proxy.stats().router["recognized"] == 36


async def turn(at: Setting, trajectory: str, **headers: str) -> str:
    reply = await ask(
        at.port, "POST", "/v1/completions", BODIES["/v1/completions"], x_trajectory_id=trajectory, **headers
    )
    assert reply.status == 200
    return reply.headers["x-llmproxy-worker"]


async def test_tasks_go_to_their_hardware() -> None:
    affinity = {"math": "H800", "default": "H20"}
    async with serving(StandIn(), StandIn(), affinity=affinity, hardware=["H800", "H20"]) as at:
        assert await turn(at, "a", x_task="math") == "w0"
        assert await turn(at, "b", x_task="shop") == "w1"
        assert await turn(at, "c") == "w1"
        body = BODIES["/v1/completions"] | {"trajectory_id": "d", "task": "math"}
        assert (await ask(at.port, "POST", "/v1/completions", body)).headers["x-llmproxy-worker"] == "w0"
        at.proxy.remove_worker("w0")
        assert await turn(at, "a", x_task="math") == "w1"
        assert at.proxy.stats().router["fallback/math/H800/H20"] == 1


async def test_one_request_of_a_trajectory_at_a_time() -> None:
    async with serving(StandIn(delay=0.02)) as at, Connection(at.port) as client:
        client.send("POST", "/v1/completions", BODIES["/v1/completions"], x_trajectory_id="t", x_request_id="r")
        await until(lambda: at.gateway.exchanges)
        second = await ask(at.port, "POST", "/v1/completions", BODIES["/v1/completions"], x_trajectory_id="t")
        assert (second.status, second.error["field"]) == (409, "trajectory_id")
        third = await ask(at.port, "POST", "/v1/completions", BODIES["/v1/completions"], x_request_id="r")
        assert (third.status, third.error["field"]) == (409, "request_id")
        managed = {"trajectory_id": "t", "prompt_ids": [1], "max_tokens": 1}
        assert (await ask(at.port, "POST", "/generate", managed)).status == 409
        assert (await client.reply()).status == 200
        assert await turn(at, "t")


async def test_suspended_requests_wait_and_then_run_under_the_new_version() -> None:
    async with serving(server := StandIn()) as at, Connection(at.port) as client:
        await at.proxy.suspend()
        client.send("POST", "/inference/v1/generate", BODIES["/inference/v1/generate"], x_trajectory_id="t")
        await until(lambda: at.proxy.passages.waiting)
        server.version = 1
        assert all(not ack.error for ack in await at.proxy.update(1))
        assert server.served == 0
        await at.proxy.resume()
        reply = await client.reply()
        assert reply.headers["x-llmproxy-version"] == "1"
        assert reply.json()["choices"][0]["token_ids"] == expected([1, 2, 3], 6, version=1)
        assert at.idle()


async def test_a_request_under_way_goes_on_over_an_update() -> None:
    async with serving(server := StandIn(delay=0.02)) as at, Connection(at.port) as client:
        body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 20, "ignore_eos": True}}
        client.send("POST", "/inference/v1/generate", body, x_trajectory_id="t")
        await until(lambda: any(len(one.versions) > 4 for one in server.running.values()))
        await at.proxy.suspend()
        server.version = 1
        await at.proxy.update(1)
        await at.proxy.resume()
        choice = (await client.reply()).json()["choices"][0]
        first, second = choice["weight_versions"]
        assert (first["version"], second["version"], second["end"]) == ("0", "1", 20)
        before = expected([1, 2, 3], first["end"], 0)
        assert choice["token_ids"] == before + expected([1, 2, 3, *before], 20 - first["end"], 1)


@pytest.mark.seconds
async def test_nobody_can_serve() -> None:
    async with serving() as at:
        reply = await ask(at.port, "POST", "/v1/completions", BODIES["/v1/completions"], x_trajectory_id="t")
        assert (reply.status, reply.error["type"]) == (503, "NoWorker")
        assert at.idle()
        assert (await ask(at.port, "GET", "/health")).status == 503


async def test_whole_generations_are_carried_by_the_proxy() -> None:
    async with serving(StandIn()) as at:
        request = {"trajectory_id": "t", "prompt_ids": [1, 2, 3], "max_tokens": 9, "sampling": {"ignore_eos": True}}
        result = (await ask(at.port, "POST", "/generate", request)).json()
        assert result["token_ids"] == expected([1, 2, 3], 9)
        assert result["spans"] == [{"version": 0, "start": 0, "end": 9}] and len(result["logprobs"]) == 9
        assert at.idle()


async def test_state_is_told() -> None:
    async with serving(StandIn(), StandIn()) as at:
        await turn(at, "t")
        assert (await ask(at.port, "GET", "/health")).json() == {"serving": 2, "workers": 2, "suspended": False}
        workers = (await ask(at.port, "GET", "/workers")).json()["workers"]
        assert [worker["id"] for worker in workers] == ["w0", "w1"] and workers[0]["url"].startswith("http://127")
        assert (await ask(at.port, "GET", "/v1/models")).json()["data"][0]["id"] == "stand-in"
        metrics = (await ask(at.port, "GET", "/metrics")).body.decode()
        assert 'llmproxy_requests_total{endpoint="/v1/completions",status="200",worker="w' in metrics
        assert "llmproxy_request_seconds_count 1" in metrics and "llmproxy_version 0" in metrics
        names = [line.split("{")[0].split(" ")[0] for line in metrics.splitlines() if line and line[0] != "#"]
        assert all(name.startswith("llmproxy_") for name in names)


async def test_keys() -> None:
    config = GatewayConfig(api_key="secret", admin_token="more")
    async with serving(StandIn(), config=config) as at:
        body = BODIES["/v1/completions"]
        assert (await ask(at.port, "GET", "/health")).status == 200
        for wrong in ({}, {"authorization": "Bearer secreT"}, {"authorization": "Bearer more"}):
            assert (await ask(at.port, "POST", "/v1/completions", body, **wrong)).status == 401
            assert (await ask(at.port, "GET", "/metrics", b"", **wrong)).status == 401
        assert (await ask(at.port, "POST", "/v1/completions", body, authorization="Bearer secret")).status == 200
        assert (await ask(at.port, "POST", "/admin/suspend", authorization="Bearer secret")).status == 401
        assert (await ask(at.port, "POST", "/admin/suspend", authorization="Bearer more")).status == 200


async def test_the_key_is_not_passed_on_and_the_workers_key_is() -> None:
    async with serving(server := Echo(), config=GatewayConfig(api_key="secret")) as at:
        await ask(at.port, "POST", "/v1/completions", {"prompt": "x"}, authorization="Bearer secret")
        assert "authorization" not in server.seen[1]
    async with serving(server := Echo(), api_key="theirs") as at:
        await ask(at.port, "POST", "/v1/completions", {"prompt": "x"}, authorization="Bearer mine")
        assert server.seen[1]["authorization"] == "Bearer theirs"
    async with serving(server := Echo()) as at:
        await ask(at.port, "POST", "/v1/completions", {"prompt": "x"}, authorization="Bearer mine")
        assert server.seen[1]["authorization"] == "Bearer mine"


async def test_draining_ends_what_is_under_way_and_takes_nothing_new() -> None:
    async with serving(StandIn(delay=0.02)) as at, Connection(at.port) as client, Connection(at.port) as idle:
        client.send("POST", "/v1/completions", BODIES["/v1/completions"], x_trajectory_id="t")
        await until(lambda: at.gateway.exchanges)
        draining = asyncio.create_task(at.gateway.drain(10.0))
        assert await idle.reader.read() == b""
        with pytest.raises(ConnectionError):
            await asyncio.open_connection("127.0.0.1", at.port)
        reply = await client.reply()
        assert reply.status == 200 and reply.headers["connection"] == "close"
        await draining


async def test_draining_has_a_deadline() -> None:
    async with serving(StandIn(delay=30.0)) as at, Connection(at.port) as client:
        client.send("POST", "/v1/completions", BODIES["/v1/completions"], x_trajectory_id="t")
        await until(lambda: at.gateway.exchanges)
        await at.gateway.drain(0.05)
        assert at.gateway.exchanges


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with serving(StandIn()) as at, Connection(at.port) as client:
        for n in range(5):
            client.send("POST", "/v1/completions", BODIES["/v1/completions"], x_request_id=f"r{n}")
        assert [(await client.reply()).headers["x-request-id"] for _ in range(5)] == [f"r{n}" for n in range(5)]
        assert at.idle()


async def test_a_large_body_passes() -> None:
    ids = list(range(100_000, 231_072))
    body = msgspec.json.encode({"token_ids": ids, "sampling_params": {"max_tokens": 1}})
    async with serving(StandIn(context_limit=200_000)) as at:
        for headers in ({}, {"x_trajectory_id": "t"}):
            assert (await ask(at.port, "POST", "/inference/v1/generate", body, **headers)).status == 200
        assert at.idle()
