"""Where time matters, async tests run on virtual time. Modules that need Ray share one small cluster each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator

import async_solipsism
import pytest

VIRTUAL = {"test_samplebuffer_patience.py", "test_samplebuffer_waiting.py", "test_samplebuffer_soak.py"}


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.path.name in VIRTUAL:
        return {"virtual": async_solipsism.EventLoop}
    return {"real": asyncio.new_event_loop}


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    import ray

    for attempts_left in (4, 3, 2, 1, 0):
        try:
            ray.init(
                address="local",
                num_cpus=2,
                include_dashboard=False,
                logging_level=logging.ERROR,
                log_to_driver=False,
                object_store_memory=200 * 2**20,
            )
            break
        except Exception:  # on a busy machine the node may need longer than the 30 s that Ray gives it
            ray.shutdown()
            if not attempts_left:
                raise
    yield
    ray.shutdown()
