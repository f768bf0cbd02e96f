"""The command line as its help describes it, in processes of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.llmproxy.gateways import Connection, Process, ask, expected, told

from llmproxy.cli import main, parser

EXAMPLE = Path(__file__).parents[2] / "examples" / "llmproxy_with_openai_client.py"
BODY = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 8, "ignore_eos": True, "logprobs": 0}}
GENERATE = "/inference/v1/generate"


def test_help_tells_a_stranger_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["serve", "--help"])
    text = capsys.readouterr().out
    for word in (
        "--worker",
        "x-trajectory-id",
        "/v1/chat/completions",
        "/admin/update",
        "LLMPROXY_API_KEY",
        "standin",
    ):
        assert word in text
    for line in text.splitlines():
        if line.strip().startswith("llmproxy "):  # its own examples are commands that exist
            words = line.strip().rstrip(" &").split()[1:]
            parser().parse_args([word.strip("'") for word in words])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--worker", "nonsense"], "is not an http(s) URL"),
        (["--worker", "http://x,color=red"], "'color' is none of hardware, id, dialect"),
        (["--worker", "http://x,dialect=x"], "none of vllm, openai, sglang"),
        (["--worker", "http://127.0.0.1:1", "--worker", "http://127.0.0.1:1"], "is given twice"),
        (["--worker", "http://x,hardware"], "is not NAME=VALUE"),
        (["--affinity", "math"], "is not NAME=VALUE"),
        (["--host", "0.0.0.0"], "needs LLMPROXY_API_KEY"),
        (["--weights", "/checkpoints"], "must hold {version}"),
        (["--weights", "/c/{version}", "--loader", "a:b"], "exclude each other"),
        (["--loader", "nowhere:make"], "give MODULE:FUNCTION"),
    ],
)
def test_wrong_arguments_are_told(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LLMPROXY_API_KEY", raising=False)
    assert main(["serve", "--port", "0", *arguments]) == 2
    assert message in capsys.readouterr().err


def serve(*arguments: str, **environment: str) -> Process:
    return Process("-m", "llmproxy.cli", "serve", "--port", "0", *arguments, **environment)


def standin(*arguments: str) -> Process:
    return Process("-m", "llmproxy.cli", "standin", "--port", "0", *arguments)


@pytest.mark.real
async def test_serve_route_record_update_and_drain() -> None:
    async with (
        standin("--delay", "0.01") as one,
        standin("--delay", "0.01") as two,
        serve(
            *("--worker", f"http://127.0.0.1:{one.port},hardware=H800,id=a"),
            *("--worker", f"http://127.0.0.1:{two.port},hardware=H20,id=b"),
            *("--affinity", "math=H800", "--affinity", "default=H20", "--record"),
        ) as gateway,
    ):
        port = gateway.port
        await told(port, "GET", "/health", lambda reply: reply.json()["serving"] == 2)
        reply = await ask(port, "POST", GENERATE, BODY, x_trajectory_id="t", x_task="math")
        assert reply.headers["x-llmproxy-worker"] == "a"
        assert reply.json()["choices"][0]["token_ids"] == expected([1, 2, 3], 8)
        assert len((await ask(port, "GET", "/trajectories/t")).json()["requests"]) == 1
        assert (await ask(port, "POST", "/admin/suspend")).status == 200
        for server in (one, two):
            await ask(server.port, "POST", "/update_weight_version", {"new_version": "1"})
        assert (await ask(port, "POST", "/admin/update", {"version": 1})).status == 200
        assert (await ask(port, "POST", "/admin/resume")).status == 200
        assert (await ask(port, "POST", GENERATE, BODY)).headers["x-llmproxy-version"] == "1"

        async with Connection(port) as client:
            client.send("POST", GENERATE, BODY | {"stream": True}, x_trajectory_id="u")
            begun = asyncio.Event()
            streamed = asyncio.create_task(client.reply(lambda _: begun.set()))
            await begun.wait()
            gateway.process.send_signal(signal.SIGTERM)
            assert (await streamed).whole  # what is under way ends
        assert await gateway.process.wait() == 0


@pytest.mark.real
async def test_workers_may_come_later_and_a_drain_has_an_end() -> None:
    late = standin("--delay", "60")
    async with standin() as first:
        port = first.port
    async with serve("--worker", f"http://127.0.0.1:{port}", "--drain", "0.2") as gateway:
        assert (await ask(gateway.port, "GET", "/workers")).json()["joining"] == [f"127.0.0.1:{port}"]
        late._arguments = ("-m", "llmproxy.cli", "standin", "--port", str(port), "--delay", "60")
        async with late:
            await told(gateway.port, "GET", "/workers", lambda reply: reply.json()["workers"])
            async with Connection(gateway.port) as client:
                client.send("POST", GENERATE, BODY, x_trajectory_id="t")
                await told(gateway.port, "GET", "/workers", lambda reply: reply.json()["workers"][0]["running"])
                gateway.process.send_signal(signal.SIGTERM)
                assert not (await client.reply()).whole
            assert await gateway.process.wait() == 0


@pytest.mark.real
async def test_keys_come_from_the_environment_and_reach_no_output() -> None:
    keys = {"LLMPROXY_API_KEY": "hush-1", "LLMPROXY_ADMIN_TOKEN": "hush-2", "LLMPROXY_WORKER_KEY": "hush-3"}
    async with standin() as server:
        arguments = ["-m", "llmproxy.cli", "serve", "--port", "0", "--worker", f"http://127.0.0.1:{server.port}"]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *arguments, "--log-level", "debug"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | keys,
        )
        assert process.stdout is not None
        lines: list[str] = []
        while not (lines and lines[-1].startswith("serving on")):
            lines.append((await process.stdout.readline()).decode())
        port = int(lines[-1].rpartition(":")[2])
        assert (await ask(port, "POST", GENERATE, BODY, authorization="Bearer wrong")).status == 401
        right = {"body": BODY, "authorization": "Bearer hush-1"}
        await told(port, "POST", GENERATE, lambda reply: reply.status == 200, **right)
        assert (await ask(port, "POST", "/admin/suspend", authorization="Bearer hush-2")).status == 200
        process.terminate()
        rest = (await process.communicate())[0].decode()
        assert "hush" not in "".join(lines) + rest


@pytest.mark.real
def test_the_example_runs() -> None:
    run = subprocess.run([sys.executable, "-W", "error", str(EXAMPLE)], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) == 9 and "made by version 0" in run.stdout


@pytest.mark.real
async def test_the_example_runs_against_a_gateway() -> None:
    async with standin() as server, serve("--record", "--worker", f"http://127.0.0.1:{server.port}") as gateway:
        await told(gateway.port, "GET", "/health", lambda reply: reply.status == 200)
        url = f"http://127.0.0.1:{gateway.port}"
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(EXAMPLE), "--url", url, stdout=subprocess.PIPE
        )
        out = (await process.communicate())[0].decode()
        assert process.returncode == 0 and len(out.splitlines()) == 9
        kept = json.loads((await ask(gateway.port, "GET", "/trajectories")).body)["trajectories"]
        assert sorted(kept) == ["maze-0", "maze-1", "maze-2"]
