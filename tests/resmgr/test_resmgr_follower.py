"""Following something outside, over outages of the store."""

import asyncio
import logging

import pytest

from resmgr import Pool, StoreUnavailable
from resmgr.follower import Follower


class Manager:
    """Registers, or says what `failures` holds next."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.registered: list[Pool] = []

    async def register(self, pool: Pool, *, replace: bool) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.registered.append(pool)


POOL = Pool("a", hardware="H800", total=8)


async def test_an_outage_of_the_store_does_not_end_the_following(monkeypatch):
    monkeypatch.setattr("resmgr.follower._PAUSE_S", 0)
    manager = Manager(StoreUnavailable("away"), StoreUnavailable("still away"))
    follower, done = Follower(manager), asyncio.Event()  # type: ignore[arg-type]

    async def follow() -> None:
        await follower.register(POOL)
        await follower.register(POOL)
        done.set()
        await asyncio.Event().wait()

    follower.start(follow(), "follow")
    await asyncio.wait_for(done.wait(), 10)
    await follower.stop()
    assert manager.registered == [POOL]


async def test_a_caller_is_told_of_the_outage():
    with pytest.raises(StoreUnavailable):
        await Follower(Manager(StoreUnavailable("away"))).register(POOL)  # type: ignore[arg-type]


async def test_a_follower_that_fails_says_so_at_once_and_at_the_end(caplog):
    follower = Follower(Manager(ValueError("broken")))  # type: ignore[arg-type]
    follower.start(follower.register(POOL), "follow")
    with caplog.at_level(logging.ERROR):
        while not caplog.records:  # noqa: ASYNC110 - the log is what is waited for
            await asyncio.sleep(0)
    assert "no longer followed" in caplog.text
    with pytest.raises(ValueError, match="broken"):
        await follower.stop()
