"""Blocking work off the event loop, and a bound on how much of it runs at once.

A thread that writes into a caller's buffer must not outlive the caller's interest in that buffer: so a cancelled
`in_thread` waits for its thread before the cancellation goes on
(`test_weightsync_blocking.py::test_a_cancelled_call_waits_for_its_thread`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

__all__ = ["each", "in_thread", "uninterrupted"]

T = TypeVar("T")


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Runs `function(*args)` in the loop's executor; a cancelled caller still waits until it has ended."""
    return await uninterrupted(asyncio.get_running_loop().run_in_executor(None, function, *args))


async def uninterrupted(future: asyncio.Future[T]) -> T:
    """The future's result; a cancelled caller waits for its end before the cancellation goes on."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        future.exception()
        raise cancelled
    return future.result()


async def each(limit: int, items: Iterable[T], work: Callable[[T], Awaitable[None]]) -> None:
    """Runs `work(item)` for all, `limit` at a time and in order; the first failure cancels the rest and is raised."""
    queue = iter(items)

    async def run() -> None:
        for item in queue:
            await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(limit):
                group.create_task(run())
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
