"""Where time matters, async tests run on virtual time: a wait that nothing can end fails at once."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import async_solipsism
import pytest

ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:  # so that the tests here share `tests.llmproxy.gateways`
    sys.path.insert(0, ROOT)

VIRTUAL = {
    "test_llmproxy_auto.py",
    "test_llmproxy_engine.py",
    "test_llmproxy_faults.py",
    "test_llmproxy_phases.py",
    "test_llmproxy_proxy.py",
    "test_llmproxy_races.py",
    "test_llmproxy_routing.py",
    "test_llmproxy_sim.py",
    "test_llmproxy_updates.py",
}


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.path.name in VIRTUAL:
        return {"virtual": async_solipsism.EventLoop}
    return {"real": asyncio.new_event_loop}
