"""What is recorded of a trajectory, by the official OpenAI client and by hand; that it is bounded."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from tests.llmproxy.faulty import Faulty
from tests.llmproxy.gateways import Connection, ask, expected, serving, until

from llmproxy.gateway import GatewayConfig
from llmproxy.standin import StandIn, logprob, send

RECORD = GatewayConfig(record=True)


async def record(port: int, id: str) -> list[dict[str, Any]]:
    reply = await ask(port, "GET", f"/trajectories/{id}")
    assert reply.status == 200 and reply.json()["trajectory_id"] == id
    return reply.json()["requests"]


def client(port: int, trajectory: str) -> openai.AsyncOpenAI:
    headers = {"x-trajectory-id": trajectory, "x-task": "chat"}
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", default_headers=headers)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_with_the_openai_client(stream: bool) -> None:
    async with serving(StandIn(), StandIn(), config=RECORD) as at, client(at.port, "talk") as llm:
        messages: list[Any] = [{"role": "user", "content": "hello"}]
        texts = []
        for n in range(4):
            asked: dict[str, Any] = {"model": "stand-in", "messages": messages, "max_tokens": 12, "temperature": 1.0}
            if stream:
                text = ""
                async for chunk in await llm.chat.completions.create(**asked, stream=True):
                    text += chunk.choices[0].delta.content or ""
            else:
                completion = await llm.chat.completions.create(**asked)
                text = completion.choices[0].message.content or ""
            texts.append(text)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"go on {n}"}]
        turns = await record(at.port, "talk")
        assert len(turns) == 4 and len({turn["worker"] for turn in turns}) == 1
        for turn, text in zip(turns, texts, strict=True):
            choice = turn["choices"][0]
            prompt, tokens = turn["prompt_token_ids"], choice["token_ids"]
            assert bytes(prompt).decode().startswith("<user>hello") and bytes(prompt).endswith(b"<assistant>")
            assert bytes(tokens).decode() == text == choice["text"]
            assert tokens == expected(prompt, len(tokens))
            assert choice["logprobs"] == [logprob(token, 0) for token in tokens]
            assert choice["spans"] == [{"version": 0, "start": 0, "end": len(tokens)}]
            assert choice["finish_reason"] in ("length", "stop")
            assert turn["whole"] and turn["status"] == 200 and turn["sampling"]["temperature"] == 1.0


@pytest.mark.parametrize("stream", [False, True])
async def test_completions_and_token_ids(stream: bool) -> None:
    async with serving(StandIn(), config=RECORD) as at:
        body = {"prompt": "abc", "max_tokens": 6, "ignore_eos": True, "stream": stream}
        await ask(at.port, "POST", "/v1/completions", body, x_trajectory_id="t")
        parameters = {"max_tokens": 5, "ignore_eos": True, "logprobs": 0}
        body = {"token_ids": [1, 2], "sampling_params": parameters, "stream": stream}
        await ask(at.port, "POST", "/inference/v1/generate", body, x_trajectory_id="t")
        request = {"trajectory_id": "t", "prompt_ids": [3], "max_tokens": 4, "sampling": {"ignore_eos": True}}
        await ask(at.port, "POST", "/generate", request)
        first, second, third = await record(at.port, "t")
        assert third["prompt_token_ids"] == [3] and third["choices"][0]["token_ids"] == expected([3], 4)
        assert third["choices"][0]["spans"] == [{"version": 0, "start": 0, "end": 4}]
        assert first["prompt_token_ids"] == list(b"abc") and first["choices"][0]["token_ids"] == expected(b"abc", 6)
        assert second["prompt_token_ids"] == [1, 2] and second["choices"][0]["token_ids"] == expected([1, 2], 5)
        assert [len(turn["choices"][0]["logprobs"]) for turn in (first, second)] == [6, 5]
        assert second["choices"][0]["spans"] == [{"version": "0", "start": 0, "end": 5}]


@pytest.mark.parametrize("path", ["/v1/completions", "/inference/v1/generate"])
async def test_a_request_that_crosses_an_update(path: str) -> None:
    async with serving(server := StandIn(delay=0.005), config=RECORD) as at, Connection(at.port) as one:
        parameters = {"max_tokens": 30, "ignore_eos": True, "logprobs": 0}
        client = {"prompt": [1, 2], "token_ids": [1, 2], "sampling_params": parameters} | parameters
        one.send("POST", path, client, x_trajectory_id="t")
        await until(lambda: any(len(now.versions) > 4 for now in server.running.values()))
        await at.proxy.suspend()
        server.version = 1
        await at.proxy.update(1)
        await at.proxy.resume()
        await one.reply()
        (turn,) = await record(at.port, "t")
        assert turn["versions"] == [0, 1] and len(turn["choices"][0]["token_ids"]) == 30
        spans = turn["choices"][0]["spans"]
        if path == "/v1/completions":
            assert spans is None  # the engine does not tell, and a guess could be wrong
        else:
            assert [span["version"] for span in spans] == ["0", "1"] and spans[1]["end"] == 30


async def test_what_the_client_asked_for_itself_wins() -> None:
    seen: list[bytes] = []

    class Server(StandIn):
        async def answer(self, method, path, headers, body, writer) -> bool:
            seen.append(body)
            return await super().answer(method, path, headers, body, writer)

    async with serving(Server(), config=RECORD) as at:
        body = b' {"prompt": "abc", "logprobs": null, "other": 1.10}'
        await ask(at.port, "POST", "/v1/completions", body, x_trajectory_id="t")
        assert seen[-1] == b'{"return_token_ids":true,"logprobs":0,"prompt": "abc", "logprobs": null, "other": 1.10}'
        (turn,) = await record(at.port, "t")
        assert turn["choices"][0]["logprobs"] is None and turn["choices"][0]["token_ids"]
        await ask(at.port, "POST", "/v1/completions", body)
        assert seen[-1] == body  # of no trajectory: nothing is recorded, nothing is asked
        await ask(at.port, "POST", "/v1/completions", b"{}", x_trajectory_id="t")
        assert seen[-1] == b'{"return_token_ids":true,"logprobs":0}'


async def test_what_was_cut_short_is_marked_and_errors_are_kept() -> None:
    async with serving(server := Faulty(), config=RECORD) as at:
        server.kind, server.left = "truncate", 1
        await ask(at.port, "POST", "/v1/completions", {"prompt": "a", "stream": True}, x_trajectory_id="t")
        server.kind, server.left = "400", 1
        await ask(at.port, "POST", "/v1/completions", {"prompt": "a"}, x_trajectory_id="t")
        cut, refused = await record(at.port, "t")
        assert not cut["whole"] and cut["choices"][0]["finish_reason"] is None
        assert refused["status"] == 400 and refused["error"]["message"] == "on purpose" and not refused["choices"]


async def test_a_retry_leaves_one_answer() -> None:
    bad, good = Faulty(), Faulty()
    async with serving(bad, good, config=RECORD) as at:
        for n in range(10):
            bad.kind, bad.left = "500", 1
            await ask(at.port, "POST", "/v1/completions", {"prompt": "abc", "max_tokens": 4}, x_trajectory_id=f"t{n}")
            (turn,) = await record(at.port, f"t{n}")
            assert turn["status"] == 200 and turn["error"] is None and turn["worker"] == "w1"


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "a", "sampling_params": "temperature"}',
        b'{"prompt": "a", "sampling": 5}',
        b'{"prompt": "a", "sampling_params": [1]}',
        b"[" * 5000,
        b"no JSON",
        b"[1]",
    ],
)
async def test_an_odd_request_does_not_hide_the_others(body: bytes) -> None:
    async with serving(Faulty(), config=RECORD) as at:
        await ask(at.port, "POST", "/v1/completions", {"prompt": "abc", "max_tokens": 4}, x_trajectory_id="t")
        await ask(at.port, "POST", "/v1/completions", body, x_trajectory_id="t")
        first, *rest = await record(at.port, "t")
        assert first["choices"][0]["token_ids"] and len(rest) <= 1
        assert all(turn["sampling"] == {} for turn in rest)


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": ["text"]},
        {"choices": 5},
        {"choices": [{"token_ids": ["one"], "text": "a"}]},
        {"choices": [{"message": {"content": [{"type": "text", "text": "a"}]}}]},
        {"choices": [{"logprobs": {"content": [{"token": "a"}]}}]},
    ],
)
async def test_an_odd_answer_passes_and_hides_no_other(answer: dict[str, Any]) -> None:
    class Odd(StandIn):
        async def answer(self, method, path, headers, body, writer) -> bool:
            if b"odd" in body:
                send(writer, answer)
                return True
            return await super().answer(method, path, headers, body, writer)

    async with serving(Odd(), config=RECORD) as at:
        good, odd = {"prompt": [1, 2], "max_tokens": 4}, {"prompt": [1, 2], "user": "odd"}
        await ask(at.port, "POST", "/v1/completions", good, x_trajectory_id="t")
        for headers in ({"x_trajectory_id": "t"}, {}):
            assert (await ask(at.port, "POST", "/v1/completions", odd, **headers)).json() == answer
        first, second = await record(at.port, "t")
        assert first["choices"][0]["token_ids"] and second["status"] == 200
        assert at.idle()


async def test_records_are_listed_deleted_and_bounded() -> None:
    async def turns(config: GatewayConfig, count: int) -> tuple[list[str], int]:
        async with serving(StandIn(), config=config) as at:
            for n in range(count):
                await ask(at.port, "POST", "/v1/completions", {"prompt": "abc"}, x_trajectory_id=f"t{n}")
            ids = (await ask(at.port, "GET", "/trajectories")).json()["trajectories"]
            assert at.gateway.recorder is not None
            kept = at.gateway.recorder.size
            if ids:
                assert (await ask(at.port, "DELETE", f"/trajectories/{ids[0]}")).status == 200
                assert (await ask(at.port, "DELETE", f"/trajectories/{ids[0]}")).status == 404
                assert (await ask(at.port, "GET", f"/trajectories/{ids[0]}")).status == 404
                for id in ids[1:]:
                    at.gateway.recorder.delete(id)
            assert at.gateway.recorder.size == 0
            return ids, kept

    assert (await turns(RECORD, 3))[0] == ["t0", "t1", "t2"]
    assert (await turns(GatewayConfig(record=True, record_count=2), 4))[0] == ["t2", "t3"]
    ids, kept = await turns(GatewayConfig(record=True, record_bytes=3000), 6)
    assert ids and ids[-1] == "t5" and kept <= 3000


async def test_records_grow_old() -> None:
    config = GatewayConfig(record=True, record_age=0.05)
    async with serving(StandIn(), config=config) as at:
        await ask(at.port, "POST", "/v1/completions", {"prompt": "abc"}, x_trajectory_id="t")
        assert at.gateway.recorder is not None
        recorder = at.gateway.recorder
        await until(lambda: len(recorder) == 0)
        await asyncio.sleep(0)
