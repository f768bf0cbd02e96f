"""What every backend keeps, whatever runs its environments: one suite for all of them.

The pods run on a double of the Kubernetes API, or on the server that KUBECONFIG names.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest
import pytest_asyncio
from tests.envmanager.fakes import BufferClosed, FakeBuffer, FakePolicy
from tests.envmanager.misbehaving import Bad
from tests.envmanager.test_envmanager_sandbox import no_sandbox

from envmanager import DataError, DeadlineExceeded, EnvManager, InfrastructureError, Limits, RolloutScheduler
from envmanager.backends import HTTPBackend, SubprocessBackend

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]

TARGET = "tests.envmanager.misbehaving:Bad"
POLICY = FakePolicy(generate_s=0.0)
LIMITS = Limits(reset_timeout=60.0, step_timeout=30.0, reset_retries=0)


class Backend(NamedTuple):
    """`isolated`: the environment's death is not the process's that plays it."""

    make_env: Any
    isolated: bool


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[str]:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = ["-m", "envmanager.cli", "serve-env", TARGET, "--port", "0", "--isolate"]
    pipe = asyncio.subprocess.PIPE
    server = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=pipe, env=environ)
    assert server.stdout is not None
    said = (await server.stdout.readline()).decode()
    yield said.split(" on ")[1].strip()
    server.send_signal(signal.SIGTERM)
    assert await server.wait() == 0


@contextlib.asynccontextmanager
async def opened(kind: str, folder: Any) -> AsyncIterator[Backend]:
    match kind:
        case "in process":
            yield Backend(Bad, isolated=False)
        case "subprocess" | "sandbox":
            async with SubprocessBackend(TARGET, sandbox=kind == "sandbox") as processes:
                yield Backend(processes, isolated=True)
            assert processes.stats().started == processes.stats().ended
        case "http":
            async with served() as url, HTTPBackend(url) as remote:
                yield Backend(remote, isolated=True)
        case "kubernetes":
            pytest.importorskip("kubernetes", reason="the extra `kubernetes` is not installed")
            from tests.envmanager.clusters import cluster

            with cluster(folder) as k8s:
                async with k8s.backend(TARGET, warm=1, reuse=True) as pods:
                    yield Backend(pods, isolated=True)
                assert k8s.agent is None or not k8s.pods()


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["in process", "subprocess", "sandbox", "http", "kubernetes"]
)
async def backend(request, tmp_path_factory):
    if request.param == "sandbox" and (reason := no_sandbox()):
        pytest.skip(reason)
    async with opened(request.param, tmp_path_factory.mktemp("backend")) as made:
        yield made


async def play(backend: Backend, key: str, seed: int = 0, limits: Limits = LIMITS) -> Any:
    return await EnvManager(backend.make_env, POLICY, limits=limits).run(key, seed)


async def test_an_episode(backend):
    played = await play(backend, "fine", 7)
    assert (played.task, played.key, played.seed, played.reward) == ("fine", "fine", 7, 1.0)
    assert played.turns[0].observation == "fine 7" and played.turns[1].observation.startswith("a0 ")
    assert played.outcome.kind == "terminated" and set(played.metadata) == {"pid"}
    assert (played.metadata["pid"] == os.getpid()) != backend.isolated


@pytest.mark.parametrize(
    ("key", "kind", "said"),
    [
        ("raises in reset", DataError, "reset raised ValueError: no such level"),
        ("four-tuple", DataError, "return the 5-tuple"),
        ("nan", DataError, "reward is float nan"),
        ("bytes", DataError, "observation is bytes"),
        ("surrogates", DataError, "lone surrogates"),
        ("exits", DataError, "step raised SystemExit: 3"),
    ],
)
async def test_what_is_wrong_has_a_type_and_costs_one_episode(backend, key, kind, said):
    with pytest.raises(kind, match=said):
        await play(backend, key)
    assert (await play(backend, "fine")).reward == 1.0


@pytest.mark.parametrize("key", ["dies", "crashes"])
async def test_a_death_is_infrastructure(backend, key):
    if not backend.isolated:
        pytest.skip("in process it would be ours")
    with pytest.raises(InfrastructureError):
        await play(backend, key)
    assert (await play(backend, "fine")).reward == 1.0


@pytest.mark.parametrize("key", ["hangs", "hangs in reset"])
async def test_what_hangs_is_given_up_and_replaced(backend, key):
    if not backend.isolated:
        pytest.skip("a thread cannot be ended")
    await play(backend, "fine")  # so that the deadline is the environment's, not the backend's start
    limits = Limits(step_timeout=0.3, reset_timeout=60.0 if key == "hangs" else 4.0, reset_retries=0)
    with pytest.raises(DeadlineExceeded):
        await play(backend, key, limits=limits)
    assert (await play(backend, "fine")).reward == 1.0


async def test_a_cancelled_episode_ends_at_once(backend):
    if not backend.isolated:
        pytest.skip("a thread cannot be ended")
    manager = EnvManager(backend.make_env, POLICY, limits=LIMITS)
    playing = asyncio.create_task(manager.run("hangs", 0))
    while manager.phase != "step":  # noqa: ASYNC110 - the phase gives no event
        await asyncio.sleep(0.01)
    playing.cancel()
    async with asyncio.timeout(20):
        await asyncio.wait([playing])
    assert playing.cancelled() and manager.phase == "idle"


async def test_many_at_once_with_bad_ones_among_them(backend):
    buffer = FakeBuffer(["fine", "nan", *["fine"] * 6, "four-tuple", "fine"])
    options: dict[str, Any] = {"concurrency": 4, "limits": LIMITS, "closed": (BufferClosed,)}
    await RolloutScheduler(backend.make_env, POLICY, buffer, **options).run()
    fates = [ticket.fate for ticket in buffer.tickets]
    assert [key for key, fate in zip(buffer.keys, fates, strict=True) if fate == "failed"] == ["nan", "four-tuple"]
    assert fates.count("finished") == 8
