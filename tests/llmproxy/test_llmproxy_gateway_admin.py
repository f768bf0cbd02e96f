"""Administration reaches every worker, answers for each, and is not a success when one failed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace
from tests.llmproxy.gateways import QUICK, Connection, ask, serving, until

from llmproxy import Ack
from llmproxy.gateway import GatewayConfig
from llmproxy.http_worker import HTTPWorker
from llmproxy.standin import StandIn

LONG = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 10_000, "ignore_eos": True, "logprobs": 0}}


class Loader:
    """Tells the server its version; may fail on one of them."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.prefetched: list[int] = []

    def engine_args(self) -> dict[str, Any]:
        return {}

    async def start(self, engine: Any) -> None:
        return

    async def prefetch(self, version: int) -> None:
        self.prefetched.append(version)

    async def load(self, engine: Any, version: int) -> str:
        if engine.id == self.failing:
            raise OSError("disk full")
        return f"digest-{version}"

    async def close(self) -> None:
        return


async def test_an_update_over_the_fleet() -> None:
    async with serving(StandIn(), StandIn(), loader=(loader := Loader())) as at:
        assert (await ask(at.port, "POST", "/admin/prefetch", {"version": 1})).status == 200
        reply = await ask(at.port, "POST", "/admin/suspend")
        assert reply.status == 200 and [one["worker"] for one in reply.json()["workers"]] == ["w0", "w1"]
        reply = await ask(at.port, "POST", "/admin/update", {"version": 1})
        assert reply.json() == {
            "ok": True,
            "workers": [
                {"worker": name, "ok": True, "version": 1, "digest": "digest-1", "error": ""} for name in ("w0", "w1")
            ],
        }
        assert (await ask(at.port, "POST", "/admin/resume")).status == 200
        assert [server.version for server in at.servers] == [1, 1] and loader.prefetched == [1, 1]
        assert (await ask(at.port, "GET", "/workers")).json()["version"] == 1


async def test_one_worker_that_fails_makes_the_whole_not_a_success() -> None:
    async with serving(StandIn(), StandIn(), loader=Loader(failing="w1")) as at:
        await ask(at.port, "POST", "/admin/suspend")
        reply = await ask(at.port, "POST", "/admin/update", {"version": 1})
        told = reply.json()
        assert reply.status == 502 and not told["ok"]
        assert [one["ok"] for one in told["workers"]] == [True, False]
        assert "disk full" in told["workers"][1]["error"] and told["error"]["message"] == "1 of 2 workers failed"
        await ask(at.port, "POST", "/admin/resume")
        for n in range(8):
            one = await ask(at.port, "POST", "/v1/completions", {"prompt": "a"}, x_trajectory_id=f"t{n}")
            assert one.headers["x-llmproxy-worker"] == "w0"


async def test_an_update_that_fails_as_a_whole_still_answers_for_each() -> None:
    config = replace(QUICK, on_failure="fail")
    async with serving(StandIn(), StandIn(), loader=Loader(failing="w1"), proxy_config=config) as at:
        await ask(at.port, "POST", "/admin/suspend")
        reply = await ask(at.port, "POST", "/admin/update", {"version": 1})
        told = {one["worker"]: one["ok"] for one in reply.json()["workers"]}
        assert reply.status == 502 and told == {"w0": True, "w1": False}
        assert (await ask(at.port, "POST", "/admin/resume")).error["type"] == "WrongState"


async def test_a_worker_that_cannot_be_suspended_is_told_and_fenced() -> None:
    class Stubborn(StandIn):
        async def answer(self, method, path, headers, body, writer) -> bool:
            if path == "/pause":
                writer.write(b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n")
                return True
            return await super().answer(method, path, headers, body, writer)

    async with serving(StandIn(), Stubborn()) as at:
        reply = await ask(at.port, "POST", "/admin/suspend")
        told = {one["worker"]: one for one in reply.json()["workers"]}
        assert reply.status == 502 and told["w0"]["ok"] and not told["w1"]["ok"]
        assert "500" in told["w1"]["error"]


async def test_abort_by_trajectory_and_by_request() -> None:
    async with serving(server := StandIn(delay=0.005)) as at:
        for id, headers in (("t", {"x_trajectory_id": "t"}), ("r", {"x_request_id": "r"})):
            async with Connection(at.port) as client:
                client.send("POST", "/inference/v1/generate", LONG, **headers)
                await until(lambda: server.running)
                assert (await ask(at.port, "POST", "/admin/abort", {"id": id})).json() == {
                    "aborted": id,
                    "worker": "w0",
                }
                reply = await client.reply()
                assert (reply.status, reply.error["type"]) == (409, "Aborted")
                await until(lambda: not server.running)
                assert at.idle()
        reply = await ask(at.port, "POST", "/admin/abort", {"id": "t"})
        assert (reply.status, reply.error["field"]) == (404, "id")


async def test_abort_of_a_stream_cuts_it_short() -> None:
    async with serving(server := StandIn(delay=0.005)) as at, Connection(at.port) as client:
        client.send("POST", "/inference/v1/generate", LONG | {"stream": True}, x_trajectory_id="t")
        await until(lambda: server.running)
        await asyncio.sleep(0.02)
        assert (await ask(at.port, "POST", "/admin/abort", {"id": "t"})).status == 200
        assert not (await client.reply()).whole


async def test_a_waiting_request_can_be_aborted() -> None:
    async with serving(StandIn()) as at, Connection(at.port) as client:
        await at.proxy.suspend()
        client.send("POST", "/inference/v1/generate", LONG, x_trajectory_id="t")
        await until(lambda: at.proxy.passages.waiting)
        assert (await ask(at.port, "POST", "/admin/interrupt", {"id": "t"})).status == 409
        assert (await ask(at.port, "POST", "/admin/abort", {"id": "t"})).status == 200
        assert (await client.reply()).status == 409 and at.idle()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/inference/v1/generate", LONG),
        ("/v1/completions", {"prompt": "abc", "max_tokens": 10_000, "ignore_eos": True, "return_token_ids": True}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "max_tokens": 10_000, "ignore_eos": True},
        ),
    ],
)
async def test_interrupt_ends_a_request_with_what_it_has(path: str, body: dict[str, Any]) -> None:
    async with serving(server := StandIn(delay=0.002)) as at, Connection(at.port) as client:
        client.send("POST", path, body | {"return_token_ids": True}, x_trajectory_id="t")
        await until(lambda: any(len(one.versions) > 3 for one in server.running.values()))
        assert (await ask(at.port, "POST", "/admin/interrupt", {"id": "t"})).status == 200
        reply = await client.reply()
        choice = reply.json()["choices"][0]
        assert reply.status == 200 and choice["finish_reason"] == "abort" and len(choice["token_ids"]) > 3


async def test_interrupt_of_a_whole_generation_returns_the_partial_which_can_go_on() -> None:
    request = {"trajectory_id": "t", "prompt_ids": [1, 2, 3], "max_tokens": 60, "sampling": {"ignore_eos": True}}
    async with serving(server := StandIn(delay=0.005)) as at, Connection(at.port) as client:
        client.send("POST", "/generate", request)
        await until(lambda: any(len(one.versions) > 3 for one in server.running.values()))
        partial = (await ask(at.port, "POST", "/admin/interrupt", {"id": "t"})).json()["partial"]
        assert (await client.reply()).error["type"] == "Interrupted"
        assert len(partial["token_ids"]) + partial["remaining"] == 60 and partial["token_ids"]
        server.delay = 0.0
        whole = (await ask(at.port, "POST", "/generate", request | {"resume": partial})).json()
        assert (
            whole["token_ids"][: len(partial["token_ids"])] == partial["token_ids"] and len(whole["token_ids"]) == 60
        )


async def test_workers_come_and_go() -> None:
    async with serving(StandIn()) as at:
        second = StandIn()
        url = f"http://127.0.0.1:{await second.start()}"
        reply = await ask(at.port, "POST", "/admin/workers", {"url": url, "id": "late", "hardware": "H20"})
        assert reply.status == 200 and reply.json()["workers"][0]["worker"] == "late"
        again = await ask(at.port, "POST", "/admin/workers", {"url": url, "id": "late"})
        assert again.status == 400 and "taken" in again.error["message"]
        assert (await ask(at.port, "DELETE", "/admin/workers/w0")).json() == {"removed": "w0"}
        assert (await ask(at.port, "DELETE", "/admin/workers/w0")).status == 404
        one = await ask(at.port, "POST", "/v1/completions", {"prompt": "a"}, x_trajectory_id="t")
        assert one.headers["x-llmproxy-worker"] == "late"
        reply = await ask(at.port, "POST", "/admin/workers", {"url": "http://127.0.0.1:1"})
        assert reply.status == 502 and "cannot connect" in reply.error["message"]
        for wrong in ({"url": "nowhere"}, {"url": url, "id": "a\r\nb: c"}, {"url": url, "dialect": "morse"}):
            assert (await ask(at.port, "POST", "/admin/workers", wrong)).status == 400
        for worker in at.proxy.workers():
            await at.gateway.worker(worker).close()
        await second.close()


async def test_a_worker_that_may_not_join_is_watched_by_nobody() -> None:
    def watching() -> int:
        coroutines = (task.get_coro() for task in asyncio.all_tasks())
        return sum("Life._watch" in repr(one) for one in coroutines)

    async with serving(StandIn()) as at:
        url = at.gateway.worker(at.proxy.workers()[0]).pool.url
        at.gateway.expect(HTTPWorker("http://127.0.0.1:1", id="late"))
        for _ in range(3):
            for id in ("w0", "late"):
                reply = await ask(at.port, "POST", "/admin/workers", {"url": url, "id": id})
                assert reply.status == 400 and "taken" in reply.error["message"]
        assert watching() == 1
        assert (await ask(at.port, "GET", "/workers")).json()["joining"] == ["late"]
        assert (await ask(at.port, "DELETE", "/admin/workers/late")).json() == {"removed": "late"}
        assert (await ask(at.port, "GET", "/workers")).json()["joining"] == []
        assert (await ask(at.port, "POST", "/admin/workers", {"url": url, "id": "late"})).status == 200
        await at.gateway.worker(at.proxy.workers()[1]).close()


async def test_an_interrupt_waits_no_longer_than_for_a_sign_of_life() -> None:
    class Deaf(StandIn):
        async def answer(self, method, path, headers, body, writer) -> bool:
            if "abort" in path:
                await asyncio.sleep(30)
            return await super().answer(method, path, headers, body, writer)

    async with serving(server := Deaf(delay=0.005), silence=0.1) as at, Connection(at.port) as client:
        client.send("POST", "/inference/v1/generate", LONG, x_trajectory_id="t")
        await until(lambda: server.running)
        reply = await ask(at.port, "POST", "/admin/interrupt", {"id": "t"})
        assert reply.status == 502 and "no answer in 0.1 s" in reply.error["message"]


async def test_a_removed_worker_finishes_what_it_has() -> None:
    async with serving(StandIn(delay=0.005), StandIn(delay=0.005)) as at, Connection(at.port) as client:
        client.send(
            "POST", "/v1/completions", {"prompt": "abc", "max_tokens": 20, "stream": True}, x_trajectory_id="t"
        )
        await until(lambda: any(server.running for server in at.servers))
        name = next(f"w{n}" for n, server in enumerate(at.servers) if server.running)
        assert (await ask(at.port, "DELETE", f"/admin/workers/{name}")).status == 200
        assert (await client.reply()).whole


async def test_who_may_administer() -> None:
    async with serving(StandIn()) as at:
        reply = await ask(at.port, "POST", "/admin/suspend", origin="http://evil.example")
        assert (reply.status, reply.error["field"]) == (403, "origin")
    async with serving(StandIn(), config=GatewayConfig(admin_token="a")) as at:
        assert (await ask(at.port, "POST", "/admin/suspend")).status == 401
        assert (await ask(at.port, "POST", "/admin/suspend", authorization="Bearer a")).status == 200


async def test_half_an_update_is_not_left_when_its_caller_goes_away() -> None:
    class Slow(Loader):
        async def load(self, engine: Any, version: int) -> str:
            await asyncio.sleep(0.1)
            return ""

    async with serving(StandIn(), StandIn(), loader=Slow()) as at:
        await ask(at.port, "POST", "/admin/suspend")
        async with Connection(at.port) as client:
            client.send("POST", "/admin/update", {"version": 1})
            await until(lambda: at.proxy.workers()[0].worker.version is None)
        await until(lambda: at.proxy.version == 1)
        assert (await at.proxy.update(1))[0] == Ack("w0", 1, "")
