"""Async tests here run on virtual time, except those marked `real`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import async_solipsism
import pytest


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.get_closest_marker("real"):
        return {"real": asyncio.new_event_loop}
    return {"virtual": async_solipsism.EventLoop}
