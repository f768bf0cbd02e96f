"""Worker processes from none to many and back: bounded, in order, ended with what hangs."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from rollart.serverless import (
    BadCall,
    BadFunction,
    Busy,
    CallTimeout,
    FunctionFailed,
    Settings,
    WorkerLost,
)
from rollart.serverless.workers import Workers

pytestmark = pytest.mark.real

MODULE = '''
import asyncio, os, subprocess, sys, time
import msgspec

class Point(msgspec.Struct):
    x: float
    y: float

def twice(value): return 2 * value
def pid(_): return {"pid": os.getpid()}
def wait(path):
    """Waits until the file is there, and tells in what order it was called."""
    open(path + ".called", "a").write("x")
    while not os.path.exists(path): time.sleep(0.005)
    return os.getpid()
def typed(point: Point) -> float: return point.x + point.y
async def later(value): await asyncio.sleep(0); return value
def broken(_): raise KeyError("no such thing")
def leave(_): sys.exit(3)
def die(_): os._exit(3)
def two(a, b): return a + b
def nothing(_): return None
def infinite(_): return float("inf")
def inside(_): return {"reward": float("nan"), "why": None}
def nulls(_): return {"why": [None, "null", 1.5]}
def orphan(_):
    if os.fork() == 0: time.sleep(600)
    os._exit(4)
def unsaid(_): raise ValueError("a name \\udcff")
def scaled(value, *, factor: float = 2.0): return factor * len(value)
def forks(value):
    if os.fork() == 0:
        if value: raise ValueError("of the child")
        return 0
    os.wait()
    return 1
def long(_): return "x" * 30_000_000
def dies_later(_):
    import threading
    threading.Timer(0.01, os._exit, (9,)).start()
    return os.getpid()
def child(_):
    subprocess.Popen(["sleep", "600"])
    print("a line that is no answer")
    time.sleep(600)
'''

Make = Callable[..., Workers]


@pytest.fixture
async def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Make]:
    (tmp_path / "serverless_case.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    made: list[Workers] = []

    def make(function: str, **settings: object) -> Workers:
        made.append(Workers(Settings(function=f"serverless_case:{function}", **settings)))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for workers in made:
        await workers.close()
    assert not [p for p in psutil.Process().children() if "serverless_case" in " ".join(p.cmdline())]


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110 - processes and files of others
            await asyncio.sleep(0.005)


async def test_from_zero_and_back(make: Make) -> None:
    workers = make("twice", workers=2, idle=0.2)
    assert workers.stats().started == 0
    assert await workers.call(b"21") == b'{"reward":42.0}'
    assert await workers.call(b"1.5") == b'{"reward":3.0}'
    stats = workers.stats()
    assert (stats.started, stats.idle, stats.cold_starts) == (1, 1, 1)
    assert stats.cold_start_s > 0 and 0 < stats.busy_s <= stats.alive_s
    await until(lambda: workers.stats().ended == 1)
    assert workers.stats().idle == 0
    assert await workers.call(b"1") == b'{"reward":2.0}'
    assert workers.stats().cold_starts == 2


async def test_some_are_always_there(make: Make) -> None:
    workers = make("twice", workers=3, least=2, idle=0.01)
    await workers.warm()
    assert (workers.stats().idle, workers.stats().cold_starts) == (2, 0)
    await workers.call(b"1")
    await asyncio.sleep(0.05)
    assert workers.stats().idle == 2


async def test_the_queue_is_bounded_and_in_order(make: Make, tmp_path: Path) -> None:
    workers = make("wait", workers=2, queue=2)
    names = [str(tmp_path / name) for name in "abcd"]
    calls = [asyncio.ensure_future(workers.call(b'"%b"' % name.encode())) for name in names[:2]]
    await until(lambda: all(os.path.exists(name + ".called") for name in names[:2]))
    calls += [asyncio.ensure_future(workers.call(b'"%b"' % name.encode())) for name in names[2:]]
    await asyncio.sleep(0)
    with pytest.raises(Busy, match="2 workers are busy and 2 calls wait") as refused:
        await workers.call(b'"e"')
    assert refused.value.retry_after >= 1
    Path(names[1]).touch()
    await calls[1]
    await until(lambda: os.path.exists(names[2] + ".called"))
    assert not os.path.exists(names[3] + ".called")
    calls[3].cancel()
    for name in (names[0], names[2]):
        Path(name).touch()
    await asyncio.gather(calls[0], calls[2])
    assert workers.stats().started == 2


async def test_a_caller_that_leaves_the_queue_hands_on_its_turn(make: Make, tmp_path: Path) -> None:
    workers = make("wait", workers=1, queue=4)
    first = asyncio.ensure_future(workers.call(b'"%b"' % str(tmp_path / "a").encode()))
    await until(lambda: (tmp_path / "a.called").exists())
    (tmp_path / "b").touch()
    waiting = [asyncio.ensure_future(workers.call(b'"%b"' % str(tmp_path / "b").encode())) for _ in range(3)]
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    waiting[0].cancel()
    assert len(await asyncio.gather(*waiting[1:])) == 2


async def test_what_hangs_is_ended(make: Make) -> None:
    workers = make("child", workers=1, timeout=0.3)
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(CallTimeout, match=r"longer than 0.3 s"):
        await workers.call(b"1")
    await until(lambda: not set(psutil.Process().children(recursive=True)) - before)
    assert workers.stats().ended == 1


async def test_a_cancelled_call_costs_its_process_and_no_other(make: Make, tmp_path: Path) -> None:
    workers = make("wait", workers=2)
    calls = [asyncio.ensure_future(workers.call(b'"%b"' % str(tmp_path / name).encode())) for name in "ab"]
    await until(lambda: all((tmp_path / f"{name}.called").exists() for name in "ab"))
    calls[0].cancel()
    (tmp_path / "b").touch()
    await calls[1]
    await until(lambda: workers.stats().ended == 1)
    assert calls[0].cancelled() and workers.stats().idle == 1


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        ("broken", FunctionFailed, "KeyError: 'no such thing'"),
        ("leave", FunctionFailed, "SystemExit: 3"),
        ("nothing", FunctionFailed, "returned None"),
        ("infinite", FunctionFailed, "finite number"),
        ("inside", FunctionFailed, "not finite"),
        ("unsaid", FunctionFailed, r"ValueError: a name \?"),
        ("die", WorkerLost, "ended with 3"),
        ("orphan", WorkerLost, "ended with 4"),
        ("absent", WorkerLost, "cannot be loaded: AttributeError"),
        ("two", WorkerLost, "cannot be called with one argument"),
    ],
)
async def test_failures_are_typed(make: Make, function: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        await make(function).call(b"1")


async def test_arguments_are_what_the_function_says(make: Make) -> None:
    workers = make("typed")
    assert await workers.call(b'{"x": 1, "y": 2}') == b'{"reward":3.0}'
    for body in (b'{"x": 1}', b"{", b"\xff", b'{"z":' + b"[" * 100_000):
        with pytest.raises(BadCall, match="not what the function takes"):
            await workers.call(body)
    assert workers.stats().started == 1
    assert await make("later").call(b"4") == b'{"reward":4.0}'
    assert (await make("pid").call(b"0")).startswith(b'{"pid":')
    assert await make("nulls").call(b"1") == b'{"why":[null,"null",1.5]}'
    assert await make("scaled").call(b"[1]") == b'{"reward":2.0}'


async def test_a_forked_child_that_comes_back_gives_no_answer(make: Make) -> None:
    workers = make("forks", workers=1)
    for body in (b"0", b"1", b"0"):
        assert await workers.call(body) == b'{"reward":1.0}'
    assert workers.stats().started == 1


async def test_a_process_that_died_with_nothing_to_do_costs_no_call(make: Make) -> None:
    workers = make("dies_later", workers=1)
    for _ in range(2):
        (process,) = (psutil.Process(int(json.loads(await workers.call(b"0"))["reward"])),)
        await until(lambda gone=process: not gone.is_running())  # type: ignore[misc]
        await until(lambda: workers._idle[0].ended)
    assert workers.stats().started == 2


async def test_an_answer_that_nobody_reads_holds_up_no_end(make: Make) -> None:
    workers = make("long", workers=1)
    call = asyncio.ensure_future(workers.call(b"0"))

    def arrives() -> bool:
        return any(len(process._process.stdout._buffer) > 1_000_000 for process in workers._all)  # type: ignore

    await until(arrives)
    assert call.cancel()
    async with asyncio.timeout(10):
        await workers.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"function": "module"}, "must be MODULE:FUNCTION"),
        ({"workers": 0}, "workers=0 must be at least 1"),
        ({"workers": 1, "least": 2}, "least=2 must be at most workers=1"),
        ({"timeout": 0}, "timeout=0 must be positive"),
        ({"port": 99999}, "port=99999 must be within 0..65535"),
        ({"idle": float("nan")}, "idle=nan must be positive"),
        ({"host": "0.0.0.0"}, "give a token, or listen on 127.0.0.1"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(BadFunction, match=message):
        Settings(**{"function": "m:f", **settings})  # type: ignore[arg-type]


def test_elsewhere_with_a_token_and_loopback_without() -> None:
    assert Settings(function="m:f", host="0.0.0.0", token="t").name == "f"
    for host in ("localhost", "127.0.0.2", "::1"):
        Settings(function="m:f", host=host)
