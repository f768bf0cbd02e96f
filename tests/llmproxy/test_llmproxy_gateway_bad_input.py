"""Bad input is answered with field and limit, before anything is queued; what only the engine can tell, it tells."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.llmproxy.gateways import ask, serving

from llmproxy.standin import StandIn

pytestmark = pytest.mark.seconds

GENERATE, COMPLETE, CHAT = "/inference/v1/generate", "/v1/completions", "/v1/chat/completions"

BAD: dict[str, tuple[str, bytes, str]] = {
    "no JSON": (COMPLETE, b"prompt=abc", "body"),
    "nothing": (COMPLETE, b"", "body"),
    "half of it": (COMPLETE, b'{"prompt": "abc"', "body"),
    "more than one value": (COMPLETE, b'{"prompt": "abc"} {}', "body"),
    "not an object": (COMPLETE, b"[1, 2]", "body"),
    "not UTF-8": (COMPLETE, b'{"prompt": "\xff\xfe"}', "body"),
    "not UTF-8 in an unknown field": (COMPLETE, b'{"prompt": "a", "other": "\xff"}', "body"),
    "NaN": (GENERATE, b'{"token_ids": [1], "sampling_params": {"temperature": NaN}}', "body"),
    "infinity": (COMPLETE, b'{"prompt": "a", "temperature": -Infinity}', "body"),
    "deep nesting": (COMPLETE, b'{"prompt": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "body"),
    "no prompt": (COMPLETE, b'{"max_tokens": 3}', "prompt"),
    "an empty text": (COMPLETE, b'{"prompt": ""}', "prompt"),
    "an empty list": (COMPLETE, b'{"prompt": []}', "prompt"),
    "no messages": (CHAT, b'{"messages": []}', "messages"),
    "messages missing": (CHAT, b"{}", "messages"),
    "no ids": (GENERATE, b'{"token_ids": [], "sampling_params": {"max_tokens": 3}}', "token_ids"),
    "ids missing": (GENERATE, b"{}", "token_ids"),
    "negative ids": (GENERATE, b'{"token_ids": [1, -1]}', "token_ids[1]"),
    "ids beyond any vocabulary": (GENERATE, b'{"token_ids": [99999999999999999999]}', "token_ids[0]"),
    "ids that are no whole numbers": (GENERATE, b'{"token_ids": [1, 2.5]}', "token_ids[1]"),
    "ids of text": (COMPLETE, b'{"prompt": [1, "2"]}', "prompt[1]"),
    "a budget of 0": (
        GENERATE,
        b'{"token_ids": [1], "sampling_params": {"max_tokens": 0}}',
        "sampling_params.max_tokens",
    ),
    "a budget of 0 for text": (COMPLETE, b'{"prompt": "a", "max_tokens": 0}', "max_tokens"),
    "a budget of 0 for a chat": (CHAT, b'{"messages": [{}], "max_completion_tokens": 0}', "max_completion_tokens"),
    "a negative budget": (COMPLETE, b'{"prompt": [1], "max_tokens": -4}', "max_tokens"),
    "a budget that is no number": (COMPLETE, b'{"prompt": "a", "max_tokens": "many"}', "max_tokens"),
    "a header in a trajectory": (COMPLETE, b'{"prompt": "a", "trajectory_id": "t\\r\\nx: y"}', "trajectory_id"),
    "a line end after a trajectory": (COMPLETE, b'{"prompt": "a", "trajectory_id": "t\\n"}', "trajectory_id"),
    "a trajectory that is not ASCII": (COMPLETE, b'{"prompt": "a", "trajectory_id": "\xc3\xa9"}', "trajectory_id"),
    "a prompt over the context": (GENERATE, b'{"token_ids": [' + b"1," * 99 + b"1]}", "prompt"),
    "a prompt and budget over it": (COMPLETE, b'{"prompt": [1, 2], "max_tokens": 50}', "max_tokens"),
}


@pytest.mark.parametrize(("path", "body", "field"), BAD.values(), ids=BAD.keys())
async def test_what_a_body_gets_wrong_is_named(path: str, body: bytes, field: str) -> None:
    async with serving(server := StandIn(context_limit=50)) as at:
        reply = await ask(at.port, "POST", path, body)
        assert reply.status == 400, reply
        assert reply.error["field"] == field and reply.error["param"] == field
        assert reply.error["limit"] and reply.error["message"] and reply.error["type"] == "InvalidRequest"
        assert server.served == 0 and at.idle() and at.gateway.metrics.refused["InvalidRequest"] == 1


async def test_the_limit_is_told() -> None:
    async with serving(StandIn(context_limit=50)) as at:
        reply = await ask(at.port, "POST", GENERATE, {"token_ids": [1] * 40, "sampling_params": {"max_tokens": 11}})
        assert "50" in reply.error["limit"] and "40 tokens" in reply.error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": ""}',
        b'{"prompt": [1, 2], "max_tokens": 50}',
        b"[1, 2]",
        b'{"prompt": 5}',
        b'{"prompt": ["a", "b"]}',
        b'{"prompt": "a", "max_tokens": "many"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": ' + b"[" * 5_000,
    ],
)
async def test_with_a_trajectory_in_the_header_the_engine_refuses_and_its_answer_passes(body: bytes) -> None:
    async with serving(StandIn(context_limit=50)) as at:
        for _ in range(20):
            reply = await ask(at.port, "POST", COMPLETE, body, x_trajectory_id="t")
            assert reply.status == 400 and reply.error["type"] == "BadRequestError"
        assert not at.proxy.stats().workers[0].fenced and at.idle()


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"trajectory_id": "", "prompt_ids": [1], "max_tokens": 1}, "trajectory_id"),
        ({"trajectory_id": "t", "prompt_ids": [], "max_tokens": 1}, "prompt_ids"),
        ({"trajectory_id": "t", "prompt_ids": [1], "max_tokens": 0}, "max_tokens"),
        ({"trajectory_id": "t", "prompt_ids": [1] * 49, "max_tokens": 2}, "max_tokens"),
        ({"trajectory_id": "t", "prompt_ids": [1], "max_tokens": 1, "sampling": {"top_p": 0}}, "sampling.top_p"),
        ({"trajectory_id": "t", "prompt_ids": [1], "max_tokens": 1, "typo": 1}, "typo"),
        ({"trajectory_id": "t", "prompt_ids": [2**63 - 1], "max_tokens": 1}, "prompt_ids"),
        ({"trajectory_id": "t", "max_tokens": 1}, "prompt_ids"),
    ],
)
async def test_whole_generations_are_checked(body: dict[str, Any], field: str) -> None:
    async with serving(server := StandIn(context_limit=50)) as at:
        reply = await ask(at.port, "POST", "/generate", body)
        assert (reply.status, reply.error["field"]) == (400, field)
        assert server.served == 0 and at.idle()


async def test_no_worker_of_the_tasks_hardware() -> None:
    async with serving(StandIn(), affinity={"math": "H800"}, hardware=["H20"]) as at:
        at.proxy._router._fallback = {}  # type: ignore[attr-defined]  # nothing but the task's own class
        reply = await ask(at.port, "POST", COMPLETE, {"prompt": "a"}, x_task="math")
        assert (reply.status, reply.error["type"]) == (503, "NoWorker") and "math" in reply.error["message"]
        assert at.idle()


async def test_paths_and_methods() -> None:
    async with serving(StandIn()) as at:
        assert (await ask(at.port, "POST", "/v1/embeddings", b"{}")).status == 404
        assert (await ask(at.port, "GET", COMPLETE)).status == 405
        assert (await ask(at.port, "POST", "/health")).status == 405
        assert (await ask(at.port, "GET", "/trajectories/t")).status == 404
        assert (await ask(at.port, "POST", "/admin/update", {"versoin": 1})).error["field"] == "versoin"
        assert (await ask(at.port, "POST", "/admin/update", {"version": 1})).error["type"] == "WrongState"


async def test_nothing_of_a_refused_head_reaches_a_log(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(StandIn()) as at:
        await ask(at.port, "POST", "/admin/suspend", authorization="Bearer hush", origin="http://evil.example")
        await ask(at.port, "POST", COMPLETE, b"{", authorization="Bearer hush")
        await asyncio.sleep(0)
    assert "hush" not in caplog.text
