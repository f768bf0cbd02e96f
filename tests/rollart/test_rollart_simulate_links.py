"""Transfers share a link fairly, and take what their bytes take."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.simulate.clock import VirtualLoop
from rollart.simulate.links import Link


def virtual(work):
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


async def timed(link: Link, start: float, nbytes: float) -> tuple[float, float]:
    await asyncio.sleep(start)
    await link.carry(nbytes)
    return nbytes, asyncio.get_running_loop().time()


def test_alone_a_stream_decides_and_together_the_capacity() -> None:
    async def run() -> None:
        link = Link(capacity=10.0, stream=4.0)
        assert (await timed(link, 0.0, 8.0))[1] == pytest.approx(2.0)
        ends = await asyncio.gather(*(timed(link, 0.0, 10.0) for _ in range(5)))
        assert [end for _, end in ends] == pytest.approx([7.0] * 5)

    virtual(run())


def test_the_first_byte_comes_after_the_latency() -> None:
    async def run() -> list[tuple[float, float]]:
        link = Link(capacity=2.0, latency=0.5)
        return await asyncio.gather(*(timed(link, 0.0, nbytes) for nbytes in (0.0, 4.0, 4.0)))

    assert [end for _, end in virtual(run())] == pytest.approx([0.0, 4.5, 4.5])


def test_nothing_passes_a_link_that_is_cut_until_it_is_mended() -> None:
    async def run() -> float:
        link = Link(stream=1.0)
        transfer = asyncio.create_task(link.carry(10.0))
        await asyncio.sleep(5.0)
        link.throttle(0.0)
        await asyncio.sleep(100.0)
        link.throttle(1.0)
        await transfer
        return asyncio.get_running_loop().time()

    assert virtual(run()) == pytest.approx(110.0)


def test_a_throttled_link_slows_what_is_under_way() -> None:
    async def run() -> float:
        link = Link(stream=1.0)
        transfer = asyncio.create_task(link.carry(10.0))
        await asyncio.sleep(5.0)
        link.throttle(0.5)
        await transfer
        return asyncio.get_running_loop().time()

    assert virtual(run()) == pytest.approx(15.0)


def test_a_cancelled_transfer_frees_its_share() -> None:
    async def run() -> float:
        link = Link(capacity=2.0)
        gone = asyncio.create_task(link.carry(1e6))
        stays = asyncio.create_task(link.carry(10.0))
        await asyncio.sleep(4.0)
        gone.cancel()
        await stays
        return asyncio.get_running_loop().time()

    assert virtual(run()) == pytest.approx(4.0 + 3.0)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(0, 20), st.floats(0.5, 30)), min_size=1, max_size=12))
def test_no_more_arrives_than_the_capacity_carries(transfers: list[tuple[float, float]]) -> None:
    async def run() -> None:
        link = Link(capacity=3.0, stream=2.0)
        ends = await asyncio.gather(*(timed(link, start, nbytes) for start, nbytes in transfers))
        last = max(end for _, end in ends)
        assert sum(nbytes for nbytes, _ in ends) <= 3.0 * last * (1 + 1e-6) + 1e-4
        for (start, nbytes), (_, end) in zip(transfers, ends, strict=True):
            assert end - start >= nbytes / 2.0 - 1e-4

    virtual(run())
