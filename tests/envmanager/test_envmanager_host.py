"""Environments that block, in threads on real time: they stall nobody, and what they do too late lands nowhere."""

import asyncio
import threading
import time
from typing import Any

import pytest
from tests.envmanager.fakes import BufferClosed, FakeBuffer, FakePolicy

from envmanager import Action, DataError, DeadlineExceeded, EnvManager, InfrastructureError, Limits, RolloutScheduler
from envmanager.threads import Threads


class Blocking:
    """Steps only when its gate is opened; notes in which threads it lives."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.gate = threading.Event()
        self.threads = {threading.get_ident()}
        self.log: list[str] = []
        self.closed = threading.Event()

    def reset(self, seed: int | None = None) -> Any:
        self.threads.add(threading.get_ident())
        return "start", {}

    def step(self, action: str) -> Any:
        self.threads.add(threading.get_ident())
        self.log.append(f"enter {action}")
        assert self.gate.wait(30)
        self.log.append(f"leave {action}")
        return "end", 1.0, True, False, {}

    def close(self) -> None:
        self.threads.add(threading.get_ident())
        self.log.append("close")
        self.closed.set()


class Instant(FakePolicy):
    async def act(self, episode: Any) -> Action:
        return Action(text=episode.key)


async def ended(key: str) -> bool:
    """Whether the threads of the key's environments end by themselves."""
    threads = [thread for thread in threading.enumerate() if thread.name == f"env {key}"]
    for thread in threads:
        await asyncio.to_thread(thread.join, 30)
    return not any(thread.is_alive() for thread in threads)


async def test_a_blocking_environment_lives_in_one_thread_of_its_own():
    made: list[Blocking] = []

    def make_env(key: str) -> Blocking:
        made.append(Blocking(key))
        made[0].gate.set()
        return made[0]

    trajectory = await EnvManager(make_env, Instant()).run("k", 0)
    assert trajectory.reward == 1.0
    assert len(made[0].threads) == 1 and made[0].threads != {threading.get_ident()}
    assert made[0].log == ["enter k", "leave k", "close"]
    assert await ended("k")


async def test_late_step_lands_nowhere():
    made: list[Blocking] = []

    def make_env(key: str) -> Blocking:
        made.append(Blocking(key))
        return made[-1]

    manager = EnvManager(make_env, Instant(), limits=Limits(step_timeout=0.05))
    with pytest.raises(DeadlineExceeded, match="step took longer"):
        await manager.run("first", 0)
    made_second = asyncio.create_task(manager.run("second", 0))
    made[0].gate.set()  # the late step ends while the next episode runs
    with pytest.raises(DeadlineExceeded):
        await made_second
    assert await asyncio.to_thread(made[0].closed.wait, 30)
    assert made[0].log == ["enter first", "leave first", "close"]
    assert made[1].log == ["enter second"] and manager.incarnation == 2
    made[1].gate.set()
    assert await asyncio.to_thread(made[1].closed.wait, 30)


async def test_an_environment_made_too_late_is_closed():
    gate, made = threading.Event(), []

    def make_env(key: str) -> Blocking:
        assert gate.wait(30)
        made.append(Blocking(key))
        return made[0]

    with pytest.raises(DeadlineExceeded, match="reset took longer"):
        await EnvManager(make_env, Instant(), limits=Limits(reset_timeout=0.05)).run("k", 0)
    assert not made
    gate.set()
    assert await ended("k")
    assert made[0].log == ["close"]


async def test_an_async_environment_made_too_late_is_closed():
    gate, closed = threading.Event(), threading.Event()

    class Async:
        async def reset(self, seed: int | None = None) -> Any: ...

        async def close(self) -> None:
            closed.set()

    def make_env(key: str) -> Async:
        assert gate.wait(30)
        return Async()

    with pytest.raises(DeadlineExceeded, match="reset took longer"):
        await EnvManager(make_env, Instant(), limits=Limits(reset_timeout=0.05)).run("late", 0)
    gate.set()
    assert await ended("late") and closed.is_set()


async def test_stuck_limit():
    gate = threading.Event()

    def make_env(key: str) -> Any:
        assert gate.wait(30)
        raise ValueError("late")

    threads = Threads(limit=2)
    for _ in range(2):
        manager = EnvManager(make_env, Instant(), limits=Limits(reset_timeout=0.02), threads=threads)
        with pytest.raises(DeadlineExceeded):
            await manager.run("stuck", 0)
    assert threads.stuck == 2
    with pytest.raises(InfrastructureError, match="2 environment threads hang"):
        await EnvManager(make_env, Instant(), threads=threads).run("stuck", 0)
    gate.set()
    assert await ended("stuck") and threads.stuck == 0
    with pytest.raises(DataError, match="late"):
        await EnvManager(make_env, Instant(), threads=threads).run("stuck", 0)


async def test_no_more_threads_is_infrastructure(monkeypatch):
    def start(thread: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(InfrastructureError, match=r"can't start new thread.*lower the concurrency"):
        await EnvManager(Blocking, Instant()).run("k", 0)


async def test_blocking_environments_overlap():
    class Slow(Blocking):
        def step(self, action: str) -> Any:
            time.sleep(0.1)
            return "end", 1.0, True, False, {}

    buffer = FakeBuffer(["k"] * 40)
    policy = FakePolicy(generate_s=0.0)
    began = time.monotonic()
    await RolloutScheduler(Slow, policy, buffer, concurrency=40, closed=(BufferClosed,)).run()
    assert time.monotonic() - began < 2.0  # one after another they take 4 s
    assert {ticket.fate for ticket in buffer.tickets} == {"finished"}


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_an_environment_that_does_not_block_steps_on_the_loop(asynchronous):
    seen: set[int] = set()

    class Plain:
        blocking = False
        task = "plain"

        def reset(self, seed: int | None = None) -> Any:
            seen.add(threading.get_ident())
            return "o", {}

        def step(self, action: str) -> Any:
            seen.add(threading.get_ident())
            return "o", 0.5, True, False, {}

    class Async(Plain):
        blocking = True

        async def reset(self, seed: int | None = None) -> Any:
            return super().reset(seed)

        async def step(self, action: str) -> Any:
            return super().step(action)

    env: type[Plain] = Async if asynchronous else Plain
    trajectory = await EnvManager(lambda key: env(), Instant()).run("k", 0)
    assert (trajectory.reward, trajectory.task, seen) == (0.5, "plain", {threading.get_ident()})
    assert await ended("k")
