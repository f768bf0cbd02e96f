"""Deadlines that share a timer: each passes at its own time, and only for its own work. On virtual time."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import pytest
from tests.envmanager.fakes import virtual

from envmanager import DeadlineExceeded
from envmanager.deadline import within


def virtually(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a test on virtual time."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        virtual(test(*args, **kwargs))

    return run


def now() -> float:
    return asyncio.get_running_loop().time()


@virtually
async def test_each_passes_at_its_own_time() -> None:
    start = now()

    async def one(delay: float) -> float:
        await asyncio.sleep(delay)
        with pytest.raises(DeadlineExceeded, match="nap took longer than 5"):
            await within("nap", 5.0, asyncio.sleep(100))
        return now() - start

    delays = [0.0, 1.0, 1.0, 4.5, 7.0, 30.0]
    assert await asyncio.gather(*map(one, delays)) == pytest.approx([delay + 5.0 for delay in delays])


@virtually
async def test_work_in_time_is_not_disturbed_later() -> None:
    assert await within("nap", 5.0, asyncio.sleep(4.9, "rested")) == "rested"
    with pytest.raises(DeadlineExceeded):
        await within("nap", 5.0, asyncio.sleep(100))
    await asyncio.sleep(100)
    task = asyncio.current_task()
    assert task is not None and not task.cancelling()


@virtually
async def test_the_inner_of_two_is_told_first_and_the_outer_cuts_what_the_inner_would_not() -> None:
    start = now()
    with pytest.raises(DeadlineExceeded, match="step took longer than 1 s"):
        await within("turn", 5, within("step", 1, asyncio.sleep(100)))
    assert now() - start == pytest.approx(1.0)
    with pytest.raises(DeadlineExceeded, match="turn took longer than 2 s"):
        await within("turn", 2, within("step", 50, asyncio.sleep(100)))
    assert now() - start == pytest.approx(3.0)


@pytest.mark.parametrize("at", [1.0, 5.0])
@virtually
async def test_a_cancellation_from_outside_stays_one(at: float) -> None:
    """Also at the very moment at which the deadline passes."""
    task = asyncio.create_task(within("nap", 5.0, asyncio.sleep(100)))
    await asyncio.sleep(at)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(10)


@pytest.mark.parametrize("error", [TimeoutError("its own"), ValueError("wrong")])
@virtually
async def test_what_the_work_raises_passes(error: Exception) -> None:
    async def fails() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        await within("nap", 5.0, fails())
    assert raised.value is error


@virtually
async def test_work_that_goes_on_in_spite_of_it_gives_its_result() -> None:
    async def stubborn() -> str:
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            await asyncio.sleep(1)
        return "done"

    assert await within("nap", 5.0, stubborn()) == "done"
    task = asyncio.current_task()
    assert task is not None and not task.cancelling()
    await asyncio.sleep(100)


@virtually
async def test_without_a_bound_it_only_waits() -> None:
    assert await within("nap", None, asyncio.sleep(10_000, "rested")) == "rested"
