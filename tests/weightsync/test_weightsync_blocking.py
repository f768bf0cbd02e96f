"""Threads end before their callers go on; bounded work fails as itself."""

from __future__ import annotations

import asyncio
import threading

import pytest

from weightsync.blocking import each, in_thread


async def test_a_cancelled_call_waits_for_its_thread() -> None:
    started, release, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        assert release.wait(10)
        ended.set()

    call = asyncio.create_task(in_thread(work))
    await in_thread(started.wait, 10)
    for _ in range(2):
        call.cancel()
        await asyncio.sleep(0)
        assert not call.done()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert ended.is_set()


async def test_a_cancelled_call_swallows_the_error_of_its_thread() -> None:
    release = threading.Event()

    def work() -> None:
        assert release.wait(10)
        raise ValueError("late")

    call = asyncio.create_task(in_thread(work))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.sleep(0)
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_each_keeps_the_order_and_the_limit() -> None:
    running, most, begun = 0, 0, []

    async def work(item: int) -> None:
        nonlocal running, most
        begun.append(item)
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    await each(2, range(9), work)
    assert begun == list(range(9)) and most == 2


async def test_the_first_failure_ends_the_rest_and_is_raised_as_itself() -> None:
    cancelled = []

    async def work(item: int) -> None:
        if item == 1:
            raise KeyError(item)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(item)
            raise

    with pytest.raises(KeyError):
        await each(2, range(9), work)
    assert cancelled == [0]
