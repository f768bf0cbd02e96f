"""Where time matters, async tests run on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import async_solipsism
import pytest

VIRTUAL = {"test_samplebuffer_waiting.py", "test_samplebuffer_soak.py"}


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.path.name in VIRTUAL:
        return {"virtual": async_solipsism.EventLoop}
    return {"real": asyncio.new_event_loop}
