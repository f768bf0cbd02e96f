"""A run in which nothing finishes any more ends with the reason; an outage, or slow episodes, do not end it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count

import async_solipsism
import pytest

from rollart.config import load_config
from rollart.runtime.starving import longest_episode, starving
from samplebuffer import SampleBuffer, Starved


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Of virtual time."""
    loop = async_solipsism.EventLoop()
    yield loop
    loop.close()


async def play(buffer: SampleBuffer, *, good: bool, seconds: float) -> None:
    """One trajectory after another, each of ten seconds."""
    clock = asyncio.get_running_loop().time
    end = clock() + seconds
    while clock() < end:
        ticket = await buffer.next_ticket()
        await asyncio.sleep(10)
        if good:
            ticket.stamp(0)
            ticket.finish(None, 1.0)
        else:
            ticket.fail(RuntimeError("the reward server is gone"))


def buffer() -> SampleBuffer:
    return SampleBuffer((f"k{n}" for n in count()), batch_groups=2, group_size=1, alpha=1000)


def test_what_fails_for_good_is_told_with_the_last_reason(loop: asyncio.AbstractEventLoop) -> None:
    async def run() -> float:
        subject = buffer()
        playing = asyncio.create_task(play(subject, good=False, seconds=10_000))
        with pytest.raises(Starved, match=r"while \d+ groups were given up.*RuntimeError: the reward server is gone"):
            await starving(subject.stats, 2, 600)
        playing.cancel()
        return asyncio.get_running_loop().time()

    assert 600 <= loop.run_until_complete(run()) <= 700


def test_an_outage_and_slow_episodes_are_borne(loop: asyncio.AbstractEventLoop) -> None:
    async def run() -> None:
        subject = buffer()
        watch = asyncio.create_task(starving(subject.stats, 2, 600))
        await play(subject, good=False, seconds=550)
        await play(subject, good=True, seconds=50)
        await play(subject, good=False, seconds=550)
        await play(subject, good=True, seconds=50)
        await asyncio.sleep(5000)
        assert not watch.done()
        watch.cancel()

    loop.run_until_complete(run())


def test_the_longest_episode_says_how_long_to_wait() -> None:
    assert longest_episode(load_config(overrides=["rollout.episode_timeout_s=50"])) == 50
    assert longest_episode(load_config(overrides=["tasks={a: {episode_timeout_s: 700}, b: {}}"])) == 700
