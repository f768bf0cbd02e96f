"""Placement groups of callers that give up, without a cluster."""

import asyncio
import threading
from typing import Any

import pytest

from resmgr import Allocation, Binding

pytest.importorskip("ray")


@pytest.mark.parametrize("timeout", [None, 0.05])
async def test_a_group_that_is_made_for_a_caller_that_gave_up_is_removed(monkeypatch, timeout):
    from resmgr.errors import BindTimeout
    from resmgr.ray import RayBackend

    may_be_made, asked = threading.Event(), asyncio.Event()
    removed: list[str] = []
    loop = asyncio.get_running_loop()

    def make(*_: Any, **__: Any) -> str:
        loop.call_soon_threadsafe(asked.set)
        may_be_made.wait(20)
        return "group"

    monkeypatch.setattr("resmgr.ray.placement_group", make)
    monkeypatch.setattr("resmgr.ray.remove_placement_group", removed.append)
    manager: Any = None
    backend = RayBackend(manager, {"H800": "GPU"})
    binding = Binding("b", "gen", "H800", False, 1, 1, 7, (Allocation("p", "n", 1),), "o", "o")
    placing = asyncio.create_task(backend.place(binding, timeout=timeout or 60))
    await asked.wait()
    if timeout is None:
        placing.cancel()
    loop.call_later(0.2, may_be_made.set)
    with pytest.raises(asyncio.CancelledError if timeout is None else BindTimeout):
        await placing
    assert removed == ["group"]
