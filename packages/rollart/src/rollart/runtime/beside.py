"""Run one coroutine beside others that it depends on: the first to end decides."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def beside(main: Coroutine[Any, Any, T], *guards: Coroutine[Any, Any, Any]) -> T:
    """The result of `main`. A guard that raises first raises here; one that returns is of no more concern.

    Whatever happens, all of them have ended when this returns (tests/rollart/test_rollart_beside.py).
    """
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
