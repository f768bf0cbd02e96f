"""A deadline on something awaited, with an error of our own.

Invariant: a TimeoutError of the work itself is never taken for the deadline's
(test_envmanager_manager.py::test_every_failure_is_typed_and_says_where).
"""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from envmanager.errors import DeadlineExceeded

T = TypeVar("T")


async def within(what: str, seconds: float | None, work: Awaitable[T]) -> T:
    """The work's result, or DeadlineExceeded with the work cancelled."""
    try:
        async with asyncio.timeout(seconds) as deadline:
            return await work
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise DeadlineExceeded(f"{what} took longer than {seconds} s") from error
