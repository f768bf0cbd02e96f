"""A cluster on a real local Ray: modes, errors, order, cancellation, deaths and restarts."""

import asyncio
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from resmgr import Infeasible, Pool, Request, ResourceManager
from rollart.distributed import (
    ActorOptions,
    Call,
    Cluster,
    Layout,
    NotRunning,
    RaySession,
    RemoteError,
    Worker,
    WorkerDied,
    hw_mapping,
    register,
    register_serverless,
)

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]


class Computed(Exception):
    """An exception whose constructor is not that of its message."""

    def __init__(self, code: int, *, where: str) -> None:
        super().__init__(f"code {code} at {where}")
        self.code = code


def _break() -> None:
    raise ValueError("no longer")


class Fragile:
    """Cannot be unpickled."""

    def __reduce__(self) -> Any:
        return _break, ()


class Actor(Worker):
    def __init__(self, tag: str = "") -> None:
        self.tag = f"{tag}{self.rank}"
        self.started: list[str] = []
        self.cancelled = 0

    def setup(self) -> None:
        print(f"{self.info.name} is set up", flush=True)

    @register("execute_all")
    def who(self, suffix: str = "") -> str:
        """Says which worker it is."""
        return self.tag + suffix

    @register("execute_rank_zero")
    def unpicklable(self) -> Any:
        return threading.Lock()

    @register("execute_rank_zero")
    def first(self) -> int:
        return self.rank

    @register("round_robin")
    async def one(self) -> int:
        return self.rank

    @register("dp_dispatch")
    def double(self, batch: list[int], *, factor: int) -> list[int]:
        return [factor * x for x in batch]

    @register("execute_all")
    def pid(self) -> int:
        return os.getpid()

    @register("execute_rank_zero")
    def child(self) -> int:
        return subprocess.Popen(["sleep", "600"]).pid

    @register("execute_all")
    def thread(self) -> str:
        time.sleep(0.01)
        return threading.current_thread().name

    @register("execute_rank_zero")
    def fail(self) -> None:
        raise Computed(7, where="here")

    @register("execute_all")
    async def fail_on(self, rank: int) -> None:
        if self.rank == rank:
            raise ValueError("only here")
        await self.wait("other")

    @register("execute_rank_zero")
    async def wait(self, name: str) -> None:
        self.started.append(name)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.cancelled += 1

    @register("execute_all")
    async def waits(self) -> tuple[int, int]:
        return len(self.started), self.cancelled


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def session() -> AsyncIterator[RaySession]:
    async with RaySession() as session:
        import ray.cloudpickle

        # Workers do not import the tests.
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        yield session


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(session: RaySession, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    options = ActorOptions(logs=tmp_path_factory.mktemp("logs"))
    async with Cluster(Actor, size=2, options=options, tag="w") as cluster:
        yield cluster


async def test_modes_choose_workers_and_keep_order(pair: Cluster) -> None:
    assert await pair.who() == ["w0", "w1"]
    assert await pair.who(suffix="!") == ["w0!", "w1!"]
    assert await pair.first() == 0
    assert sorted([await pair.one(), await pair.one()]) == [0, 1]
    assert await pair.double([1, 2, 3], factor=2) == [2, 4, 6]
    assert await asyncio.to_thread(pair.who().result, 30) == ["w0", "w1"]


async def test_methods_keep_signature_and_docstring(pair: Cluster) -> None:
    import inspect

    assert str(inspect.signature(pair.who)) == "(suffix: str = '') -> str"
    assert pair.who.__doc__ == "Says which worker it is."
    assert {"who", "double"} < set(dir(pair))
    with pytest.raises(AttributeError, match="no 'nothing'; methods with a decorator: child, double"):
        pair.nothing()


def typing_example(cluster: Cluster, batch: list[int]) -> tuple[Call, list[int]]:
    """What a type checker is to accept, and does: these tests are checked."""
    call: Call = cluster.double(batch, factor=2)
    doubled: list[int] = call.result(timeout=30)
    return call, doubled


async def test_the_typing_example_runs(pair: Cluster) -> None:
    call, doubled = await asyncio.to_thread(typing_example, pair, [1, 2])
    assert isinstance(call, Call) and doubled == [2, 4]


async def test_plain_methods_run_in_one_thread(pair: Cluster) -> None:
    """Concurrent calls of plain methods take turns in one thread, and the loop stays free for async ones."""
    threads = await asyncio.gather(*(pair.thread() for _ in range(5)), pair.one())
    assert {tuple(names) for names in threads[:-1]} == {("actor-0_0", "actor-1_0")}


async def test_errors_carry_who_where_and_the_remote_traceback(pair: Cluster) -> None:
    with pytest.raises(RemoteError) as caught:
        await pair.fail()
    error = caught.value
    assert (error.worker, error.role, error.rank, error.method) == ("actor-0", "actor", 0, "fail")
    assert error.node and "raise Computed(7" in error.trace
    assert isinstance(error.original, Exception) and error.original.code == 7  # type: ignore[attr-defined]
    with pytest.raises(RemoteError, match="code 7 at here"):
        await asyncio.to_thread(pair.fail().result, 30)


async def settled(cluster: Cluster, started: int, cancelled: int) -> None:
    """Wait until both workers have so many calls under way and cancelled; each look is a round trip."""
    async with asyncio.timeout(30):
        while await cluster.waits() != [(started, cancelled)] * 2:
            pass


async def test_cancelling_reaches_the_worker(pair: Cluster) -> None:
    before = (await pair.waits())[0]
    call = asyncio.ensure_future(pair.members[0].call("wait", "a"))
    other = asyncio.ensure_future(pair.members[1].call("wait", "a"))
    await settled(pair, before[0] + 1, before[1])
    call.cancel()
    other.cancel()
    await settled(pair, before[0] + 1, before[1] + 1)
    assert call.cancelled() and other.cancelled()


async def test_the_first_failure_cancels_the_other_parts(pair: Cluster) -> None:
    before = await pair.waits()
    with pytest.raises(RemoteError, match="only here"):
        await pair.fail_on(1)
    async with asyncio.timeout(30):
        while (await pair.waits())[0] != (before[0][0] + 1, before[0][1] + 1):
            pass


async def test_a_failure_that_nobody_waits_for_is_one_line(
    pair: Cluster, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    pair.fail()
    async with asyncio.timeout(30):
        while not caplog.messages:
            await pair.who()
            gc.collect()
    (told,) = caplog.messages
    assert re.fullmatch(r"actor-0 raised in fail, and nobody waited for it: .*Computed: code 7 at here", told)
    assert capfd.readouterr().err == ""


async def test_death_brings_the_last_log_lines(session: RaySession, tmp_path: Path) -> None:
    """A killed worker ends `died` and the calls in flight at it, well within 30 s, with its name and last lines."""
    async with Cluster(Actor, size=2, role="gen", options=ActorOptions(logs=tmp_path)) as cluster:
        hanging = [asyncio.ensure_future(member.call("wait", "x")) for member in cluster.members]
        pids = await cluster.pid()
        async with asyncio.timeout(20):
            os.kill(pids[1], signal.SIGKILL)
            died = await cluster.died
            with pytest.raises(WorkerDied) as caught:
                await hanging[1]
        assert caught.value is died
        assert (died.worker, died.role, died.rank) == ("gen-1", "gen", 1)
        assert died.log == "gen-1 is set up"
        with pytest.raises(WorkerDied):
            cluster.who()
        assert await cluster.one() == await cluster.one() == 0
        assert cluster.stats().up == 1
        assert not hanging[0].done()
        hanging[0].cancel()


async def test_death_without_calls_is_noticed(session: RaySession) -> None:
    """And what the worker had started ends with it."""
    async with Cluster(Actor, role="idle") as cluster:
        child = psutil.Process(await cluster.child())
        os.kill(cluster.members[0].pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            assert (await cluster.died).worker == "idle-0"
        assert await asyncio.to_thread(psutil.wait_procs, [child], 10) == ([child], [])


async def test_what_cannot_be_carried_is_no_death(pair: Cluster) -> None:
    """A result, or an argument, that does not survive the way fails the call alone."""
    with pytest.raises(RemoteError, match="on the way"):
        await pair.unpicklable()
    with pytest.raises(RemoteError, match="no longer"):
        await pair.who(Fragile())
    assert await pair.who() == ["w0", "w1"]


async def test_a_worker_is_restarted_on_its_resource(session: RaySession, tmp_path: Path) -> None:
    async with Cluster(Once, role="again", options=ActorOptions(logs=tmp_path, restarts=1)) as cluster:
        member = cluster.members[0]
        first = member.pid
        assert await cluster.slow_pid(str(tmp_path / "mark")) != first
        assert cluster.stats().restarts == 1 and not cluster.died.done()
        os.kill(member.pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            assert "again-0" in str(await cluster.died)


class Once(Worker):
    @register("round_robin", idempotent=True)
    def slow_pid(self, mark: str) -> int:
        """Dies in its first call."""
        if not os.path.exists(mark):
            Path(mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid()


class Broken(Worker):
    def __init__(self, how: str) -> None:
        self.how = how

    def setup(self) -> None:
        print("about to break", flush=True)
        if self.rank == 1 and self.how == "raise":
            raise ValueError("no such device")
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    @register("execute_all")
    def pid(self) -> int:
        return os.getpid()


@pytest_asyncio.fixture(loop_scope="module")
async def resources(tmp_path: Path) -> AsyncIterator[ResourceManager]:
    async with await ResourceManager.connect(f"embedded:{tmp_path / 'store'}") as rm:
        for hardware in ("H800", "H20", "cpu"):
            await rm.register(Pool(hardware.lower(), hardware=hardware, total=4))
        yield rm


@pytest.mark.parametrize("how", ["raise", "kill"])
async def test_failed_setup_leaves_nothing(
    session: RaySession, resources: ResourceManager, tmp_path: Path, how: str
) -> None:
    options = ActorOptions(logs=tmp_path)
    request = Request("broken", prefer=["cpu"], amount=2)
    cluster = Cluster(Broken, resources, 2, request=request, options=options, how=how)
    with pytest.raises(WorkerDied, match="about to break") as caught:
        async with asyncio.timeout(40):
            await cluster.start()
    assert caught.value.worker == "broken-1"
    assert how == "kill" or "no such device" in caught.value.reason
    assert resources.bindings == {} and cluster.members == ()
    with pytest.raises(NotRunning, match="await its start"):
        cluster.pid()


class Judge(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        body = b'{"reward": %d}' % length
        self.rfile.read(length)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def judge() -> Iterator[str]:
    """The URL of a function that rewards by the length of what it is given."""
    with HTTPServer(("127.0.0.1", 0), Judge) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


async def test_a_serverless_attribute_calls_its_function(session: RaySession, judge: str) -> None:
    class Reward(Worker):
        @register_serverless(attr="reward_proxy", url=judge)
        def compute_rewards(self, trajectory: list[int]) -> Any:
            return self.reward_proxy(trajectory)  # type: ignore[attr-defined]

    async with Cluster(Reward) as cluster:
        rewards = await asyncio.gather(*(cluster.compute_rewards([1] * n) for n in (1, 2, 3)))
    assert rewards == [3.0, 5.0, 7.0]


async def test_it_may_be_a_function_that_rollart_serves(session: RaySession) -> None:
    from rollart.serverless import FunctionServer, Settings

    async with FunctionServer(Settings(function="builtins:len", port=0)) as server:

        class Counting(Worker):
            @register_serverless(attr="count", url=server.url)
            async def length(self, value: list[int]) -> float:
                return float(await self.count(value))  # type: ignore[attr-defined]

        async with Cluster(Counting, role="counting") as cluster:
            assert await cluster.length([1, 2, 3]) == 3.0


async def test_ray_options_place_each_worker(session: RaySession) -> None:
    """`place` has the last word on what an actor asks for; too much is a start that times out, by name."""
    options = ActorOptions(place=lambda info: {"num_cpus": 100 + info.rank}, start_timeout=2)
    with pytest.raises(WorkerDied, match=r"gen-0.*longer than 2 s"):
        await Cluster(Gen, options=options).start()


class Gen(Worker):
    @hw_mapping({"FrozenLake": "H800", "default": "H20"})
    async def generate(self, request: dict[str, str]) -> str:
        return self.info.hardware

    @register("execute_all")
    def pid(self) -> int:
        return os.getpid()


async def test_affinity_routes_by_tag_and_falls_back(session: RaySession, resources: ResourceManager) -> None:
    requests = [Request("gen", ["H800"], ["H20"]), Request("gen", ["H20"], ["H800"])]
    async with Cluster(Gen, resources, 2, request=requests) as cluster:
        assert await cluster.generate({"tag_name": "FrozenLake"}) == "H800"
        assert await cluster.generate({"task": "math"}) == "H20"
        assert await cluster.generate(request={"tag_name": "FrozenLake"}) == "H800"
        assert cluster.stats().fallbacks == 0
        os.kill((await cluster.pid())[0], signal.SIGKILL)
        async with asyncio.timeout(20):
            await cluster.died
        assert await cluster.generate({"tag_name": "FrozenLake"}) == "H20"
        assert cluster.stats().fallbacks == 1
    assert resources.bindings == {}


async def test_resources_are_bound_for_all_workers_or_none(session: RaySession, resources: ResourceManager) -> None:
    requests = [Request("gen", ["H800"], amount=4), Request("gen", ["H20"], amount=5)]
    with pytest.raises(Infeasible):
        await Cluster(Gen, resources, 9, request=requests).start()
    with pytest.raises(ValueError, match=r"size=3 workers do not divide over the granted amounts \[4.0, 4.0\]"):
        await Cluster(Gen, resources, 3, request=[requests[0], Request("gen", ["H20"], amount=4)]).start()
    assert resources.bindings == {}


class Sum(Worker):
    """Two data-parallel ranks of two tensor-parallel ones each."""

    @property
    def layout(self) -> Layout:
        return Layout(self.rank // 2, 2, collects=self.rank % 2 == 0)

    @register("dp_dispatch")
    def total(self, batch: list[int], *, scale: int = 1) -> list[int]:
        """The rank and the sum of its share."""
        return [self.rank, scale * sum(batch)]

    @register("execute_all")
    def kind(self, value: Any, nested: list[Any]) -> tuple[str, str]:
        return type(value).__name__, type(nested[0]).__name__


async def test_batches_are_split_by_the_layout_and_collected_once(session: RaySession) -> None:
    async with Cluster(Sum, size=4, role="sum") as cluster:
        assert await cluster.total([1, 2, 3, 4, 5], scale=10) == [0, 30, 2, 120]


async def test_a_method_may_not_have_the_name_of_what_a_cluster_has() -> None:
    for name in ("start", "role", "size"):
        taken = type("Taken", (Worker,), {name: register()(lambda self: None)})
        with pytest.raises(ValueError, match="rename it"):
            Cluster(taken)


@pytest.mark.parametrize("size", [0, -1, 1.5, "2", True, None])
async def test_a_size_is_a_whole_number(size: Any) -> None:
    with pytest.raises(ValueError, match="must be a whole number, at least 1"):
        Cluster(Gen, size=size)


async def test_of_two_starts_at_once_one_is_refused(session: RaySession) -> None:
    cluster = Cluster(Sum, role="once")
    first, second = await asyncio.gather(cluster.start(), cluster.start(), return_exceptions=True)
    assert first is None and isinstance(second, NotRunning)
    assert await cluster.total([1, 2]) == [0, 1]
    await cluster.stop()


async def test_object_references_pass_through(session: RaySession) -> None:
    """The driver does not fetch them: as an argument Ray gives the worker the value, inside others the reference."""
    import ray

    async with Cluster(Sum, size=2, role="refs") as cluster:
        reference = ray.put(list(range(3)))
        assert await cluster.kind(reference, [reference]) == [("list", "ObjectRef")] * 2


def broken(how: str) -> int:
    if how == "forks":
        child = os.fork()
        return os.waitpid(child, 0)[1] if child else 7
    raise {"cancelled": asyncio.CancelledError, "interrupted": KeyboardInterrupt, "closed": GeneratorExit}[how]


class Loop(Worker):
    """Both kinds of methods."""

    @register("round_robin")
    async def breaks(self, how: str) -> int:
        return broken(how)

    @register("round_robin")
    def breaks_beside(self, how: str) -> int:
        return broken(how)


async def test_what_methods_raise_in_place_of_errors_is_an_error(session: RaySession) -> None:
    """It neither cancels nor interrupts the caller, and costs the worker nothing. A forked child gives no answer."""
    async with Cluster(Steps, role="steps") as plain, Cluster(Loop, role="loop") as loop:
        for method in (plain.breaks, loop.breaks, loop.breaks_beside):
            for how, name in (("cancelled", "CancelledError"), ("closed", "GeneratorExit")):
                with pytest.raises(RemoteError, match=name) as caught:
                    await method(how)
                assert caught.value.original is None
        with pytest.raises(RemoteError, match="KeyboardInterrupt"):
            await plain.breaks("interrupted")
        async with asyncio.timeout(20):
            for method in (plain.breaks, loop.breaks, loop.breaks_beside):
                assert await method("forks") == 0
        assert plain.stats().up == loop.stats().up == 1


class Steps(Worker):
    """Plain methods only."""

    def __init__(self) -> None:
        self.done: list[str] = []

    @register("round_robin")
    def step(self, method: str, gate: str = "") -> str:
        """Waits until the file `gate` is there."""
        Path(f"{gate}.begun").touch() if gate else None
        while gate and not os.path.exists(gate):
            time.sleep(0.005)
        self.done.append(method)
        return method

    @register("round_robin")
    def all_done(self) -> list[str]:
        return self.done

    @register("round_robin")
    def fail(self) -> None:
        raise Computed(7, where="here")

    @register("round_robin")
    def breaks(self, how: str) -> int:
        return broken(how)


async def test_a_plain_worker_takes_calls_in_order_and_forgets_those_cancelled(
    session: RaySession, tmp_path: Path
) -> None:
    import ray

    async with Cluster(Steps, role="steps") as cluster:
        member, gate = cluster.members[0], tmp_path / "gate"
        first = cluster.step(method="a", gate=str(gate))
        async with asyncio.timeout(30):
            while not gate.with_suffix(".begun").exists():  # noqa: ASYNC110 - a file of another process
                await asyncio.sleep(0.005)
        gone = asyncio.ensure_future(cluster.step(method="gone"))
        await asyncio.sleep(0)
        gone.cancel()  # before it has left
        second, forgotten, third = cluster.step(method="b"), member.submit("step", "c"), cluster.step(method="d")
        waits = asyncio.ensure_future(member.wait(forgotten, "step"))
        await asyncio.sleep(0)
        waits.cancel()
        await asyncio.wait([waits])
        await asyncio.sleep(0.5)  # Ray tells the worker of it in its own time, and nobody of that
        gate.touch()
        with pytest.raises(ray.exceptions.TaskCancelledError):
            await forgotten
        async with asyncio.timeout(20):
            assert [await first, await second, await third] == ["a", "b", "d"]
        assert await cluster.all_done() == ["a", "b", "d"]


async def test_a_plain_workers_errors_and_death_are_those_of_any(session: RaySession, tmp_path: Path) -> None:
    options = ActorOptions(logs=tmp_path, restarts=1)
    async with Cluster(Steps, role="plain", options=options) as cluster:
        with pytest.raises(RemoteError, match="raise Computed") as caught:
            await cluster.fail()
        assert caught.value.original.code == 7  # type: ignore[union-attr]
        busy = asyncio.ensure_future(cluster.step("a", str(tmp_path / "never")))
        first = cluster.members[0].pid
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(20):
            with pytest.raises(WorkerDied):
                await busy
            await cluster.members[0].settled.wait()
            assert await cluster.step("b") == "b" and cluster.members[0].pid != first
            os.kill(cluster.members[0].pid, signal.SIGKILL)
            assert (await cluster.died).worker == "plain-0"


class Half(Worker):
    """Plain methods, of which one gives an awaitable."""

    @register("round_robin")
    def later(self) -> Any:
        return asyncio.sleep(0, "later")

    @register("round_robin")
    def thread(self) -> str:
        return threading.current_thread().name

    def setup(self) -> None:
        self.first = threading.current_thread().name

    @register("round_robin")
    def set_up_in(self) -> str:
        return self.first


async def test_a_plain_worker_has_one_thread_and_may_give_awaitables(session: RaySession) -> None:
    async with Cluster(Half, role="plain") as cluster:
        assert await cluster.later() == "later"
        assert {await cluster.thread() for _ in range(3)} == {await cluster.set_up_in()}
