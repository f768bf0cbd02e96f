"""A function over HTTP: its contract, keys that run once, overload, tokens, an end that loses nothing."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from envmanager.rewards import URLReward
from rollart.serverless import BadFunction, FunctionServer, Settings

pytestmark = pytest.mark.real

MODULE = """
import os, time

def score(value):
    with open(value["log"], "a") as log: log.write("x")
    while not os.path.exists(value.get("until", "/")): time.sleep(0.005)
    return value["score"]

def tokens(trajectory): return float(len(trajectory["turns"]))
def broken(_): raise ValueError("not today")
def die(_): os._exit(1)
"""


class Function:
    """A server of one function, and a client of it."""

    def __init__(self, server: FunctionServer, session: aiohttp.ClientSession) -> None:
        self.server = server
        self.session = session

    async def post(self, body: Any, path: str = "/", **headers: str) -> tuple[int, Any, Any]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        sent = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with self.session.post(self.server.url + path, headers=named, **sent) as response:
            return response.status, await response.json(), response.headers

    async def get(self, path: str, **headers: str) -> tuple[int, str]:
        async with self.session.get(self.server.url + path, headers=headers) as response:
            return response.status, await response.text()


Serve = Callable[..., Any]


@pytest.fixture
async def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Serve]:
    (tmp_path / "server_case.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())

        async def serve(function: str, **settings: Any) -> Function:
            made = FunctionServer(Settings(function=f"server_case:{function}", port=0, **settings))
            return Function(await stack.enter_async_context(made), session)

        yield serve


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110 - files of other processes
            await asyncio.sleep(0.005)


async def test_the_contract(serve: Serve, tmp_path: Path) -> None:
    function = await serve("score", largest_body=1000)
    body = {"log": str(tmp_path / "log"), "score": 0.5}
    assert (await function.post(body))[:2] == (200, {"reward": 0.5})
    assert (await function.post(body, "/function/score"))[:2] == (200, {"reward": 0.5})
    assert (await function.post(body, "/function/other"))[:2] == (
        404,
        {"error": "there is no function 'other' here, but 'score'"},
    )
    status, answer, _ = await function.post(b"{")
    assert status == 400 and "not what the function takes" in answer["error"]
    assert (await function.post(b"1" * 2000))[0] == 413
    assert (await function.post({"log": body["log"]}))[:2] == (
        500,
        {"error": "the function raised KeyError: 'score'"},
    )
    for path in ("/healthz", "/_/health", "/_/ready"):
        assert await function.get(path) == (200, '{"function": "score"}')
    assert (await (await serve("die")).post(1))[0] == 502


async def test_a_key_runs_once(serve: Serve, tmp_path: Path) -> None:
    function = await serve("score", workers=4)
    log, gate = tmp_path / "log", tmp_path / "gate"
    body = {"log": str(log), "score": 1, "until": str(gate)}
    first = asyncio.ensure_future(function.post(body, Idempotency_Key="a"))
    await until(log.exists)
    second = asyncio.ensure_future(function.post(body, Idempotency_Key="a"))
    first.cancel()
    await asyncio.wait([first])
    status, answer, _ = await function.post({**body, "score": 2}, Idempotency_Key="a")
    assert status == 422 and "another body" in answer["error"]
    gate.touch()
    status, answer, headers = await second
    assert (status, answer, headers["Idempotent-Replayed"]) == (200, {"reward": 1.0}, "true")
    assert (await function.post(body, Idempotency_Key="a"))[1] == {"reward": 1.0}
    assert log.read_text() == "x"


async def test_a_failure_may_be_tried_again_under_its_key(serve: Serve) -> None:
    function = await serve("broken")
    for _ in range(2):
        assert (await function.post(1, Idempotency_Key="a"))[0] == 500
    assert function.server.calls.replayed == 0


async def test_old_answers_are_forgotten(serve: Serve, tmp_path: Path) -> None:
    function = await serve("score", remembered=1)
    for key in ("a", "b", "a"):
        body = {"log": str(tmp_path / key), "score": 1}
        await function.post(body, Idempotency_Key=key)
    assert (tmp_path / "a").read_text() == "xx"


async def test_overload_says_when_to_come_again(serve: Serve, tmp_path: Path) -> None:
    function = await serve("score", workers=1, queue=0)
    gate = tmp_path / "gate"
    body = {"log": str(tmp_path / "log"), "score": 1, "until": str(gate)}
    running = asyncio.ensure_future(function.post(body))
    await until((tmp_path / "log").exists)
    status, _, headers = await function.post(body)
    assert (status, int(headers["Retry-After"]) >= 1) == (429, True)
    gate.touch()
    assert (await running)[0] == 200


async def test_a_caller_that_leaves_ends_its_call(serve: Serve, tmp_path: Path) -> None:
    function = await serve("score", workers=1)
    body = {"log": str(tmp_path / "log"), "score": 1, "until": str(tmp_path / "never")}
    call = asyncio.ensure_future(function.post(body))
    await until((tmp_path / "log").exists)
    call.cancel()
    await until(lambda: function.server.workers.stats().ended == 1)
    assert (await function.post({**body, "until": "/"}))[0] == 200


async def test_a_call_that_takes_too_long_is_told(serve: Serve, tmp_path: Path) -> None:
    function = await serve("score", timeout=0.2)
    body = {"log": str(tmp_path / "log"), "score": 1, "until": str(tmp_path / "never")}
    assert (await function.post(body))[:2] == (504, {"error": "the call took longer than 0.2 s"})


async def test_only_who_has_the_token_may_call(serve: Serve, tmp_path: Path) -> None:
    function = await serve("score", token="secret")
    body = {"log": str(tmp_path / "log"), "score": 1}
    assert (await function.post(body))[0] == 401
    assert (await function.post(body, Authorization="Bearer wrong"))[0] == 401
    assert (await function.post(body, Authorization="Bearer secret"))[0] == 200
    assert (await function.get("/metrics"))[0] == 401
    assert (await function.get("/healthz"))[0] == 200
    assert (tmp_path / "log").read_text() == "x"


async def test_calls_under_way_are_answered(serve: Serve, tmp_path: Path) -> None:
    function = await serve("score")
    gate = tmp_path / "gate"
    body = {"log": str(tmp_path / "log"), "score": 1, "until": str(gate)}
    running = [asyncio.ensure_future(function.post(body, **key)) for key in ({}, {"Idempotency_Key": "a"})]
    await until(lambda: (tmp_path / "log").exists() and len((tmp_path / "log").read_text()) == 2)
    ending = asyncio.ensure_future(function.server.stop())
    await asyncio.sleep(0)
    assert (await function.get("/_/ready"))[0] == 503
    assert (await function.post(body))[0] == 503
    assert not ending.done()
    gate.touch()
    assert [(await call)[0] for call in running] == [200, 200]
    await ending
    with pytest.raises(aiohttp.ClientConnectionError):
        await function.get("/healthz")


async def test_metrics(serve: Serve, tmp_path: Path) -> None:
    function = await serve("score", workers=1)
    body = {"log": str(tmp_path / "log"), "score": 1}
    for _ in range(3):
        await function.post(body, Idempotency_Key="a")
    await function.post(b"{")
    text = (await function.get("/metrics"))[1]
    values = dict(re.findall(r"^rollart_function_(\S+) (\S+)$", text, re.MULTILINE))
    assert (values['calls_total{code="200"}'], values['calls_total{code="400"}']) == ("3", "1")
    assert (values["replayed_total"], values["cold_starts_total"], values["started_total"]) == ("2", "1", "1")
    assert (values['workers{state="idle"}'], values["seconds_count"]) == ("1", "4")
    assert 0 < float(values["utilisation"]) < 1 and float(values["cold_start_seconds_total"]) > 0


async def test_envmanagers_client_calls_it(serve: Serve, trajectory: Any) -> None:
    function = await serve("tokens")
    async with URLReward(function.server.url) as reward:
        assert await reward(trajectory) == 1.0
        assert await reward(trajectory) == 1.0
    assert function.server.calls.replayed == 1


@pytest.fixture
def trajectory() -> Any:
    from envmanager.values import Outcome, Timings, Trajectory, Turn

    turn = Turn(
        observation="2+2?",
        action="4",
        prompt_ids=[],
        token_ids=[],
        logprobs=[],
        spans=[],
        new_segment=False,
        reward=0.0,
        generate_at=0.0,
        generate_s=0.0,
        env_at=0.0,
        env_s=0.0,
    )
    return Trajectory(
        id="t",
        key="k",
        seed=0,
        task="math",
        turns=[turn],
        reward=0.0,
        outcome=Outcome("terminated", 1),
        timings=Timings(started=0.0, reset_s=0.0, ended=1.0),
        metadata={"answer": "4"},
    )


async def test_what_cannot_be_served_is_told_at_the_start(serve: Serve) -> None:
    with pytest.raises(BadFunction, match="cannot be loaded: AttributeError"):
        await serve("absent", least=1)
    function = await serve("score")
    port = int(function.server.url.rpartition(":")[2])
    with pytest.raises(BadFunction, match="cannot serve"):
        await FunctionServer(Settings(function="server_case:score", port=port)).start()


async def command(*arguments: str, folder: Path) -> asyncio.subprocess.Process:
    """Run in the folder."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollart.cli.main", "serve-reward", *arguments, "--port", "0"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environ,
        cwd=folder,
    )


async def test_the_command_serves_a_module_of_its_folder_until_it_is_told_to_end(tmp_path: Path) -> None:
    (tmp_path / "server_case.py").write_text(MODULE)
    process = await command("server_case:score", folder=tmp_path)
    assert process.stdout is not None and process.stderr is not None
    line = (await process.stdout.readline()).decode()
    url = line.rpartition(" at ")[2].strip()
    gate, log = tmp_path / "gate", tmp_path / "log"
    async with aiohttp.ClientSession() as session:
        body = {"log": str(log), "score": 0.25, "until": str(gate)}
        call = asyncio.ensure_future(session.post(url, json=body))
        await until(log.exists)
        process.send_signal(signal.SIGTERM)
        gate.touch()
        assert await (await call).json() == {"reward": 0.25}
    assert await process.wait() == 0 and await process.stderr.read() == b""


async def test_the_command_refuses_what_it_cannot_load(tmp_path: Path) -> None:
    (tmp_path / "server_case.py").write_text(MODULE)
    process = await command("server_case:absent", folder=tmp_path)
    _, errors = await process.communicate()
    assert process.returncode == 2
    assert errors.decode() == (
        "rollart: function='server_case:absent' cannot be loaded: AttributeError: module 'server_case' has no "
        "attribute 'absent'; name one that Python can import here\n"
    )


async def test_an_error_inside_the_functions_module_is_told_by_its_place(tmp_path: Path) -> None:
    (tmp_path / "server_case.py").write_text("score = 1 / 0\n")
    process = await command("server_case:score", folder=tmp_path)
    _, errors = await process.communicate()
    assert process.returncode == 2
    assert f"ZeroDivisionError: division by zero ({tmp_path / 'server_case.py'}:1); name" in errors.decode()
    assert "Traceback" not in errors.decode()
