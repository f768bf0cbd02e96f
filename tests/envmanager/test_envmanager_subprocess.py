"""Environments and rewards in real processes: whatever they do, the outcome is typed, and they are gone."""

import asyncio
import itertools
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.envmanager.fakes import BufferClosed, FakeBuffer, FakePolicy
from tests.envmanager.test_envmanager_values import trajectory

from envmanager import (
    Action,
    DataError,
    DeadlineExceeded,
    EnvManager,
    InfrastructureError,
    Limits,
    RewardError,
    RolloutScheduler,
)
from envmanager.backends import SubprocessBackend
from envmanager.rewards import PoolReward

pytestmark = pytest.mark.real

HOME = "tests.envmanager.misbehaving"
LIMITS = Limits(step_timeout=20.0, reset_timeout=60.0, reset_retries=0)


class Says(FakePolicy):
    def __init__(self, text: str = "go") -> None:
        super().__init__()
        self.text = text

    async def act(self, episode: Any) -> Action:
        return Action(text=self.text)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def pid_of(trajectory: Any) -> int:
    return int(trajectory.metadata["pid"])


async def test_an_episode_in_a_process():
    async with SubprocessBackend(f"{HOME}:Fine") as backend:
        played = await EnvManager(backend, Says()).run("k", 5)
        assert (played.task, played.turns[0].observation, played.reward) == ("fine", "k 5", 1.0)
        assert pid_of(played) != os.getpid() and "unplain" not in played.metadata
        assert alive(pid_of(played))
    assert not alive(pid_of(played)) and backend.stats().ended == 1


async def test_a_process_is_used_again_only_when_clean(tmp_path):
    async with SubprocessBackend(f"{HOME}:Forks") as backend:
        for n in range(2):
            await EnvManager(backend, Says()).run(str(tmp_path / f"pids{n}"), 0)
        assert backend.stats() == msgspec.convert({"started": 2, "ended": 2, "reused": 0}, type(backend.stats()))
    async with SubprocessBackend(f"{HOME}:Slow") as backend:
        pids = [pid_of(await EnvManager(backend, Says()).run("k", 0)) for _ in range(3)]
        assert len(set(pids)) == 1 and backend.stats().reused == 2
    async with SubprocessBackend(f"{HOME}:Fine", reuse=False) as backend:
        pids = [pid_of(await EnvManager(backend, Says()).run("k", 0)) for _ in range(2)]
        assert len(set(pids)) == 2 and not any(map(alive, pids))


@pytest.mark.parametrize("ending", ["clean", "hang", "cancel"])
async def test_children_go_with_their_environment(tmp_path, ending):
    file = tmp_path / "pids"
    limits = Limits(step_timeout=4.0 if ending == "hang" else None)
    async with SubprocessBackend(f"{HOME}:Forks") as backend:
        manager = EnvManager(backend, Says("hang" if ending != "clean" else "go"), limits=limits)
        playing = asyncio.create_task(manager.run(str(file), 0))
        if ending == "cancel":
            while not file.exists() or not file.read_text().endswith("\n"):  # noqa: ASYNC110 - a file gives no event
                await asyncio.sleep(0.01)
            playing.cancel()
        await asyncio.wait([playing])
        left = [int(pid) for pid in file.read_text().split()]
        assert len(left) == 2 and not any(map(alive, left))
        assert backend.stats().ended == 1


@pytest.mark.parametrize(
    ("key", "kind", "said"),
    [
        ("raises in reset", DataError, "reset raised ValueError: no such level"),
        ("raises what cannot be sent", DataError, r"reset raised ValueError: \?"),
        ("cancels itself", DataError, "reset raised CancelledError"),
        ("four-tuple", DataError, "return the 5-tuple"),
        ("nan", DataError, "reward is float nan"),
        ("bytes", DataError, "observation is bytes"),
        ("surrogates", DataError, "lone surrogates"),
        ("exits", DataError, "step raised SystemExit: 3"),
        ("dies", InfrastructureError, "exited with code 7; its last output: the disk is full"),
        ("crashes", InfrastructureError, "was killed by SIGSEGV"),
        ("memory", InfrastructureError, "MemoryError"),
        ("writes on every descriptor", InfrastructureError, "the stream is broken"),
    ],
)
async def test_bad_environments(key, kind, said):
    async with SubprocessBackend(f"{HOME}:Bad", memory_bytes=512 << 20) as backend:
        with pytest.raises(kind, match=said):
            await EnvManager(backend, Says(), limits=LIMITS).run(key, 0)
        assert (await EnvManager(backend, Says(), limits=LIMITS).run("fine", 0)).reward == 1.0
        assert backend.stats().ended == (kind is InfrastructureError and key != "memory")
    assert backend.stats().started == backend.stats().ended


@pytest.mark.parametrize("key", ["hangs in reset", "hangs", "deaf"])
async def test_a_hanging_step_is_killed_and_replaced(key):
    async with SubprocessBackend(f"{HOME}:Bad") as backend:
        first = await EnvManager(backend, Says()).run("fine", 0)
        with pytest.raises(DeadlineExceeded):
            await EnvManager(backend, Says(), limits=Limits(step_timeout=0.2, reset_timeout=0.5)).run(key, 0)
        assert backend.stats().started == backend.stats().ended == 1 and not alive(pid_of(first))
        assert (await EnvManager(backend, Says()).run("fine", 0)).reward == 1.0


async def test_printing_without_end():
    async with SubprocessBackend(f"{HOME}:Bad") as backend:
        assert (await EnvManager(backend, Says(), limits=LIMITS).run("prints", 0)).reward == 1.0


async def test_a_process_that_died_idle_is_not_used_again():
    limits = Limits(reset_retries=0)
    async with SubprocessBackend(f"{HOME}:Fine") as backend:
        pid = pid_of(await EnvManager(backend, Says(), limits=limits).run("k", 0))
        (idle,) = backend._pool._idle
        os.kill(pid, signal.SIGKILL)
        while not idle.ended:  # noqa: ASYNC110 - nobody reads from it, so nothing tells
            await asyncio.sleep(0.01)
        assert pid_of(await EnvManager(backend, Says(), limits=limits).run("k", 0)) != pid
        assert (backend.stats().ended, backend.stats().reused) == (1, 0)


async def test_a_start_that_is_given_up_during_the_import_kills_nobody_else(monkeypatch):
    killed: list[Any] = []
    monkeypatch.setattr("envmanager.backends.process.REAP_S", 0.05)
    monkeypatch.setattr(os, "killpg", lambda *call: killed.append(call))  # group 0 would be our own
    async with asyncio.timeout(20), SubprocessBackend("tests.envmanager.endless:Env") as backend:
        with pytest.raises(DeadlineExceeded):
            await EnvManager(backend, Says(), limits=Limits(reset_timeout=0.2, reset_retries=0)).run("k", 0)
        assert backend.stats().started == backend.stats().ended == 1
    assert killed == []


async def test_a_worker_that_talks_nonsense_is_ended():
    async with SubprocessBackend("envmanager.nothing:here") as backend:
        with pytest.raises(DataError, match="cannot be imported"):
            await EnvManager(backend, Says(), limits=LIMITS).run("k", 0)
    async with SubprocessBackend(f"{HOME}:Bad") as backend:
        with pytest.raises(InfrastructureError, match="announced a reply of"):
            await EnvManager(backend, Says(), limits=LIMITS).run("writes on every descriptor", 0)
        assert backend.stats().ended == 1


async def test_one_bad_among_many_disturbs_nobody():
    buffer = FakeBuffer([*("fine" for _ in range(8)), "hangs", "dies", "nan"])
    policy = FakePolicy(generate_s=0.0)
    async with SubprocessBackend(f"{HOME}:Bad") as backend:
        limits = Limits(step_timeout=5.0, reset_retries=0)
        options: dict[str, Any] = {"concurrency": 4, "limits": limits, "closed": (BufferClosed,)}
        await RolloutScheduler(backend, policy, buffer, **options).run()
        assert [ticket.fate for ticket in buffer.tickets] == [*["finished"] * 8, *["failed"] * 3]
        assert backend.stats().reused >= 4


async def test_bad_configuration():
    with pytest.raises(ValueError, match="memory_bytes is 5"):
        SubprocessBackend("a:b", memory_bytes=5)


async def test_pool_reward_replaces_what_hangs_or_dies():
    scored = msgspec.structs.replace(trajectory(), key="fine")
    async with PoolReward(f"{HOME}:score", processes=1) as reward:
        first, second = await reward(scored), await reward(scored)
        assert first == second > 0.5  # the same process
        for key, kind, said in [
            ("raises", RewardError, "KeyError: 'no answer'"),
            ("nan", RewardError, "finite"),
            ("dies", InfrastructureError, "exited with code 9"),
        ]:
            with pytest.raises(kind, match=said):
                await reward(msgspec.structs.replace(scored, key=key))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await reward(msgspec.structs.replace(scored, key="hangs"))
        assert await reward(scored) != first


ORPHANING = f"""
import asyncio, os, signal
from envmanager.backends import SubprocessBackend

def parent(pid):
    return int(open(f"/proc/{{pid}}/stat").read().rsplit(")", 1)[1].split()[1])

async def main():
    env = SubprocessBackend("{HOME}:Fine")("k")
    _, info = await env.reset(seed=0)
    worker = info["pid"]
    print(worker, parent(worker), parent(parent(worker)), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


IMPORTING = """
import asyncio, os, signal
from envmanager.backends import SubprocessBackend

async def main():
    backend = SubprocessBackend("tests.envmanager.endless:Env")
    resetting = asyncio.create_task(backend("k").reset(seed=0))
    while backend._pool._forks._nursery is None:
        await asyncio.sleep(0)
    print(backend._pool._forks._nursery.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.mark.parametrize(("script", "pids"), [(ORPHANING, 3), (IMPORTING, 1)], ids=["playing", "importing"])
async def test_environments_do_not_outlive_a_killed_parent(script, pids):
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipe = asyncio.subprocess.PIPE
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=pipe, env=environ)
    out, _ = await parent.communicate()
    assert parent.returncode == -signal.SIGKILL and len(out.split()) == pids
    async with asyncio.timeout(20):
        while any(alive(int(pid)) for pid in out.split()):  # noqa: ASYNC110 - nobody here is their parent
            await asyncio.sleep(0.01)


async def test_a_target_with_threads_is_not_forked():
    async with SubprocessBackend("tests.envmanager.threaded:Threaded") as backend:
        played = await EnvManager(backend, Says()).run("k", 0)
        assert played.metadata["threads"] == 2  # the worker imported it itself: a fork would have lost the thread


async def test_forks_do_not_draw_the_same():
    async with SubprocessBackend(f"{HOME}:Draws", reuse=False) as backend:
        one, other = [(await EnvManager(backend, Says()).run("k", 0)).metadata for _ in range(2)]
        assert one["numpy"] != other["numpy"] and one["python"] != other["python"]


async def test_a_nursery_that_dies_is_replaced():
    async with SubprocessBackend(f"{HOME}:Fine", reuse=False) as backend:
        env = backend("k")
        await env.reset(seed=0)
        nursery = backend._pool._forks._nursery
        assert nursery is not None
        nursery.kill()
        await nursery.wait()
        assert (await env.step("x"))[1] == 0.5  # what it forked lives on
        await env.close()
        assert (await EnvManager(backend, Says()).run("k", 0)).reward == 1.0


async def test_killed_workers_cost_only_their_episodes():
    turns = itertools.count()
    killed: set[int] = set()

    class Assassin(FakePolicy):
        """Kills every fourth environment's process before its first step."""

        async def act(self, episode: Any) -> Action | None:
            pid = int(episode.info.get("pid", 0))
            if pid and next(turns) % 4 == 1:
                killed.add(pid)
                os.kill(pid, signal.SIGKILL)
            return await super().act(episode)

    buffer = FakeBuffer(["k"] * 24)
    async with SubprocessBackend(f"{HOME}:Fine") as backend:
        options: dict[str, Any] = {"concurrency": 4, "closed": (BufferClosed,)}
        rollouts = RolloutScheduler(backend, Assassin(generate_s=0.0), buffer, **options)
        await rollouts.run()
        fates = [ticket.fate for ticket in buffer.tickets]
        assert killed and fates.count("failed") == len(killed) and fates.count("finished") == 24 - len(killed)
        assert rollouts.stats().failed == {"infrastructure": len(killed)}
        assert "was killed by SIGKILL" in str(next(ticket.error for ticket in buffer.tickets if ticket.error))
    assert backend.stats().started == backend.stats().ended
