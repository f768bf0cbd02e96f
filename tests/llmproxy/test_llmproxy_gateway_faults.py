"""The gateway while its workers die, fall silent, fail, flap and lie, over real sockets."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.llmproxy.faulty import Faulty
from tests.llmproxy.gateways import Connection, Process, Reply, Setting, ask, expected, serving, until

from llmproxy import LLMProxy, ProxyConfig
from llmproxy.gateway import Gateway, GatewayConfig
from llmproxy.http_worker import HTTPWorker

FAULTY = str(Path(__file__).with_name("faulty.py"))
BODY = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 12, "ignore_eos": True}}
GENERATE = "/inference/v1/generate"


def right(reply: Reply, budget: int = 12, prompt: list[int] | None = None) -> bool:
    choice = reply.json()["choices"][0]
    tokens = expected(prompt or [1, 2, 3], budget)
    return reply.whole and choice["token_ids"] == tokens and choice["finish_reason"] == "length"


async def many(at: Setting, count: int) -> list[Reply]:
    asked = (ask(at.port, "POST", GENERATE, BODY, x_trajectory_id=f"t{n}") for n in range(count))
    return await asyncio.gather(*asked)


@pytest.mark.parametrize("kind", ["500", "drop", "truncate", "half", "garbage", "half whole"])
async def test_a_request_whose_worker_fails_before_its_client_heard_anything_is_sent_elsewhere(kind: str) -> None:
    bad, good = Faulty(), Faulty()
    async with serving(bad, good) as at:
        for n in range(20):
            bad.kind, bad.left = kind, 2
            reply = await ask(at.port, "POST", GENERATE, BODY, x_trajectory_id=f"t{n}")
            if kind in ("truncate", "half", "half whole") and not reply.whole:
                assert reply.headers["x-llmproxy-worker"] == "w0"  # it had begun: cut short, and seen to be
            else:
                assert reply.status == 200 and right(reply)
        assert at.idle()


@pytest.mark.parametrize("kind", ["truncate", "half", "half whole"])
async def test_an_answer_cut_short_never_looks_whole(kind: str) -> None:
    async with serving(server := Faulty()) as at:
        server.kind, server.left = kind, 1
        reply = await ask(at.port, "POST", GENERATE, BODY | {"stream": True}, x_trajectory_id="t")
        assert reply.status == 200 and not reply.whole
        assert at.gateway.metrics.truncated == 1
        await until(at.idle)


async def test_a_single_worker_that_only_fails_is_told() -> None:
    async with serving(server := Faulty()) as at:
        server.kind, server.left = "500", 3
        reply = await ask(at.port, "POST", GENERATE, BODY, x_trajectory_id="t")
        assert (reply.status, reply.error["message"]) == (500, "on purpose")
        server.kind, server.left = "garbage", 100
        reply = await ask(at.port, "POST", GENERATE, BODY, x_trajectory_id="t")
        assert (reply.status, reply.error["type"]) == (502, "WorkerLost")
        assert at.idle()


async def test_4xx_storms_open_no_breaker() -> None:
    async with serving(server := Faulty()) as at:
        server.kind, server.left = "400", 200
        replies = await many(at, 200)
        assert {reply.status for reply in replies} == {400} and replies[0].error["message"] == "on purpose"
        assert not at.proxy.stats().workers[0].fenced and at.idle()
        assert right(await ask(at.port, "POST", GENERATE, BODY, x_trajectory_id="t"))


async def test_5xx_storms_open_the_breaker_and_nothing_is_lost() -> None:
    bad, good = Faulty(), Faulty()
    async with serving(bad, good) as at:
        bad.kind, bad.left = "500", 10_000
        for n in range(60):
            assert right(await ask(at.port, "POST", GENERATE, BODY, x_trajectory_id=f"t{n}"))
        assert "server errors in a row" in at.proxy.stats().workers[0].fenced
        assert 10_000 - bad.left <= at.gateway.config.breaker and good.served == 60  # each was sent there once
        bad.left = 0
        await until(lambda: not at.proxy.stats().workers[0].fenced)  # cools down, then proves itself
        assert at.idle()


async def test_a_client_that_leaves_frees_the_worker_and_its_load() -> None:
    async with serving(server := Faulty(delay=0.005)) as at:
        for stream in (False, True):
            async with Connection(at.port) as client:
                parameters = {"max_tokens": 10_000, "ignore_eos": True}
                body = {"token_ids": [1], "sampling_params": parameters, "stream": stream}
                client.send("POST", GENERATE, body, x_trajectory_id="t")
                await until(lambda: server.running)
                assert at.proxy.stats().workers[0].running == 1
            await until(lambda: not server.running)
            await until(at.idle)
        assert at.gateway.metrics.disconnects == 2


async def test_a_client_that_leaves_while_waiting_is_forgotten() -> None:
    async with serving(Faulty()) as at:
        await at.proxy.suspend()
        async with Connection(at.port) as client:
            client.send("POST", GENERATE, BODY, x_trajectory_id="t")
            await until(lambda: at.proxy.passages.waiting)
        await until(at.idle)
        await at.proxy.resume()


@asynccontextmanager
async def processes(count: int, delay: float = 0.0, **config: Any) -> AsyncIterator[tuple[Setting, list[Process]]]:
    """A gateway here over servers in processes of their own."""
    servers = [Process(FAULTY, "0", str(delay)) for _ in range(count)]
    await asyncio.gather(*(server.start() for server in servers))
    workers = [
        HTTPWorker(f"http://127.0.0.1:{server.port}", id=f"w{n}", watch=0.1, silence=0.5)
        for n, server in enumerate(servers)
    ]
    for worker in workers:
        await worker.start()
    proxy = LLMProxy(workers, config=ProxyConfig(patience=20.0, answer=2.0, probe_first=0.05, probe_every=0.2))
    gateway = Gateway(proxy, GatewayConfig(**config))
    port = await gateway.start()
    try:
        yield Setting(gateway, port, []), servers
    finally:
        await gateway.close()
        await proxy.close()
        for worker in workers:
            await worker.close()
            worker.pool.abort()
        for server in servers:
            await server.__aexit__()


@pytest.mark.real
async def test_kill_9_in_the_middle() -> None:
    async with processes(2, delay=0.01) as (at, servers):
        async with Connection(at.port) as streaming, Connection(at.port) as plain:
            body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 100, "ignore_eos": True}}
            streaming.send("POST", GENERATE, body | {"stream": True}, x_trajectory_id="s")
            heard = asyncio.Event()
            streamed = asyncio.create_task(streaming.reply(lambda _: heard.set()))
            await heard.wait()
            name = at.gateway.exchanges["s"].worker
            while True:  # a second one, on the same worker
                plain.send("POST", GENERATE, body, x_trajectory_id="p")
                await until(lambda: "p" in at.gateway.exchanges)
                if at.gateway.exchanges["p"].worker == name:
                    break
                await ask(at.port, "POST", "/admin/abort", {"id": "p"})
                await plain.reply()
            servers[int(name[1])].process.send_signal(signal.SIGKILL)
            assert not (await streamed).whole
            reply = await plain.reply()
            assert right(reply, 100) and reply.headers["x-llmproxy-worker"] != name
        await until(at.idle)
        assert "cannot connect" in {w.id: w.fenced for w in at.proxy.stats().workers}[name]


@pytest.mark.real
async def test_sigstop_accepts_and_never_answers() -> None:
    async with processes(2, delay=0.005) as (at, servers):
        servers[0].process.send_signal(signal.SIGSTOP)
        replies = await many(at, 20)
        assert all(right(reply) for reply in replies)
        assert {reply.headers["x-llmproxy-worker"] for reply in replies} == {"w1"}
        assert "no sign of life" in at.proxy.stats().workers[0].fenced
        servers[0].process.send_signal(signal.SIGCONT)
        await until(lambda: not at.proxy.stats().workers[0].fenced)
        assert at.idle()


@pytest.mark.real
async def test_slow_start_and_a_restart_at_the_same_place() -> None:
    async with processes(1) as (at, servers):
        port = servers[0].port
        servers[0].process.send_signal(signal.SIGKILL)
        await servers[0].process.wait()
        waiting = asyncio.create_task(ask(at.port, "POST", GENERATE, BODY, x_trajectory_id="t"))
        await until(lambda: at.proxy.passages.waiting)
        again = Process(FAULTY, str(port))
        await again.start()
        assert right(await waiting)
        await again.__aexit__()


async def trajectory(at: Setting, number: int, counts: Counter[str], choose: random.Random) -> None:
    """Three turns, each tried until a whole answer comes, as a client's retries do; every answer is checked."""
    context = [number % 251, number // 251 + 1]
    for _ in range(3):
        budget = choose.randrange(4, 16)
        body = {"token_ids": context, "sampling_params": {"max_tokens": budget, "ignore_eos": True}}
        for _ in range(20):
            counts["requests"] += 1
            async with Connection(at.port) as client:
                client.send("POST", GENERATE, body | {"stream": False}, x_trajectory_id=f"t{number}")
                reply = await client.reply()
            if reply.status == 200 and reply.whole:
                break
            counts[f"error {reply.status}"] += 1
            if reply.status == 200 or reply.status == 0:
                counts["cut short"] += 1
            elif reply.status != 400:  # 400s are made on purpose
                assert reply.error["type"] in ("WorkerLost", "NoWorker", "Fault", "DuplicateRequest"), reply
            await asyncio.sleep(0.05)
        choice = reply.json()["choices"][0]
        assert choice["token_ids"] == expected(context, budget), "a wrong, lost or doubled token"
        assert {span["version"] for span in choice["weight_versions"]} == {"0"}
        context = context + choice["token_ids"]
    counts["finished"] += 1


async def chaos(at: Setting, servers: list[Process], choose: random.Random) -> None:
    """One trouble after the other, until cancelled. Worker 0 stays well, and worker 1 dies again and again."""
    kinds = ["500", "400", "drop", "truncate", "half", "garbage", "half whole"]
    flaps = 0
    for turn in range(10**6):
        victim = choose.randrange(2, len(servers))
        match turn % 3:
            case 0:
                kind = {"kind": choose.choice(kinds), "count": 20}
                await ask(servers[victim].port, "POST", "/fault", kind)
            case 1:
                servers[victim].process.send_signal(signal.SIGSTOP)
                await asyncio.sleep(0.8)
                servers[victim].process.send_signal(signal.SIGCONT)
            case 2 if flaps < 4:
                flaps += 1
                port = servers[1].port
                servers[1].process.send_signal(signal.SIGKILL)
                await servers[1].process.wait()
                servers[1]._arguments = (FAULTY, str(port), "0.001")
                await servers[1].start()
        await asyncio.sleep(0.1)


async def fleet_under_chaos(count: int) -> Counter[str]:
    choose = random.Random(7)
    counts: Counter[str] = Counter()
    async with processes(4, delay=0.001) as (at, servers):
        trouble = asyncio.create_task(chaos(at, servers, choose))
        gate = asyncio.Semaphore(32)

        async def one(number: int) -> None:
            async with gate:
                await trajectory(at, number, counts, choose)

        try:
            await asyncio.gather(*(one(number) for number in range(count)))
        finally:
            trouble.cancel()
            await asyncio.gather(trouble, return_exceptions=True)
            for server in servers:
                if server.process.returncode is None:
                    server.process.send_signal(signal.SIGCONT)
        await until(at.idle)
    return counts


@pytest.mark.real
async def test_100_trajectories_under_all_of_it_together() -> None:
    counts = await fleet_under_chaos(100)
    assert counts["finished"] == 100


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_1000_trajectories_under_all_of_it_together() -> None:
    counts = await fleet_under_chaos(1000)
    print(dict(counts))
    assert counts["finished"] == 1000
