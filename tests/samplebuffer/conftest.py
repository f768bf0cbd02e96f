"""Where time matters, async tests run on virtual time. Modules that need Ray share one small cluster each."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator

import async_solipsism
import pytest

VIRTUAL = {"test_samplebuffer_waiting.py", "test_samplebuffer_soak.py"}


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.path.name in VIRTUAL:
        return {"virtual": async_solipsism.EventLoop}
    return {"real": asyncio.new_event_loop}


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    import ray

    os.environ.setdefault("RAY_raylet_start_wait_time_s", "250")  # a busy machine needs longer than the default
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
        object_store_memory=200 * 2**20,
    )
    yield
    ray.shutdown()
