"""Run one coroutine beside others that it depends on: the first to end decides.

Whatever happens, all of them have ended when these return (tests/rollart/test_rollart_beside.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def beside(main: Coroutine[Any, Any, T], *guards: Coroutine[Any, Any, Any]) -> T:
    """The result of `main`. A guard that raises first raises here; one that returns is of no more concern."""
    work = asyncio.create_task(main)
    pending = {work, *(asyncio.create_task(guard) for guard in guards)}
    everything = set(pending)
    try:
        while not work.done():
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {work}:
                task.result()
        return work.result()
    finally:
        for task in everything:
            task.cancel()
        await asyncio.gather(*everything, return_exceptions=True)


async def unless(
    stop: asyncio.Event, work: Coroutine[Any, Any, T], *, may_cancel: Callable[[], bool] = lambda: True
) -> T | None:
    """The result of `work`; None when `stop` is set first and `work` may be cancelled then."""
    working, asked = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, asked}, return_when=asyncio.FIRST_COMPLETED)
        if working.done() or not may_cancel():
            return await working
        return None
    finally:
        for task in (working, asked):
            task.cancel()
        await asyncio.gather(working, asked, return_exceptions=True)
