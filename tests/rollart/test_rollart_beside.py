"""`beside` and `unless`: the first to end decides, and nothing is left running."""

from __future__ import annotations

import asyncio

import pytest

from rollart.runtime.beside import beside, unless


async def forever(log: list[str]) -> int:
    try:
        return await asyncio.get_running_loop().create_future()
    finally:
        log.append("ended")


async def gives(value: int) -> int:
    await asyncio.sleep(0)
    return value


async def raises(error: Exception) -> None:
    await asyncio.sleep(0)
    raise error


def nothing_runs() -> bool:
    return asyncio.all_tasks() == {asyncio.current_task()}


async def test_the_main_result_ends_the_guards() -> None:
    log: list[str] = []
    assert await beside(gives(7), forever(log)) == 7
    assert log == ["ended"]
    assert nothing_runs()


async def test_a_guard_that_raises_ends_the_main_one() -> None:
    log: list[str] = []
    with pytest.raises(ConnectionError, match="gone"):
        await beside(forever(log), raises(ConnectionError("gone")))
    assert log == ["ended"]
    assert nothing_runs()


async def test_a_guard_that_returns_is_of_no_concern() -> None:
    assert await beside(gives(7), gives(1), gives(2)) == 7


async def test_cancelling_ends_all() -> None:
    log: list[str] = []
    task = asyncio.create_task(beside(forever(log), forever(log)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert log == ["ended", "ended"]
    assert nothing_runs()


async def test_work_ends_as_it_likes_while_nobody_asks() -> None:
    stop = asyncio.Event()
    assert await unless(stop, gives(3)) == 3
    with pytest.raises(ValueError, match="no"):
        await unless(stop, raises(ValueError("no")))
    assert nothing_runs()


async def test_asking_cancels_work_that_may_be_cancelled() -> None:
    stop, log = asyncio.Event(), list[str]()
    asyncio.get_running_loop().call_soon(stop.set)
    assert await unless(stop, forever(log)) is None
    assert log == ["ended"]
    assert nothing_runs()


async def test_asking_waits_for_work_that_may_not() -> None:
    stop = asyncio.Event()
    stop.set()
    assert await unless(stop, gives(3), may_cancel=lambda: False) == 3
    assert nothing_runs()
