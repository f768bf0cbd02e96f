"""A simulated machine's cores are shared equally, and never more is computed than they can."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.simulate.clock import VirtualLoop
from rollart.simulate.host import Host

Work = tuple[float, float]
"""When a thread begins, and the CPU seconds that it has to compute."""


def virtual(work: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def now() -> float:
    return asyncio.get_running_loop().time()


async def ends(cores: int, works: Sequence[Work]) -> list[float]:
    """When each thread has computed its work."""
    host = Host(cores, 0.0)

    async def thread(at: float, seconds: float) -> float:
        await asyncio.sleep(at)
        await host.compute("trainer", seconds)
        return now()

    return await asyncio.gather(*(thread(*work) for work in works))


def by_hand(cores: int, works: Sequence[Work]) -> list[float]:
    """The same in steps from one begin or end to the next."""
    left, time, ended = dict(enumerate(works)), 0.0, [0.0] * len(works)
    while left:
        running = [n for n, (at, _) in left.items() if at <= time]
        begins = [at for at, _ in left.values() if at > time]
        rate = min(1.0, cores / len(running)) if running else 0.0
        until = min([*begins, *(time + left[n][1] / rate for n in running)])
        for n in running:
            left[n] = (left[n][0], left[n][1] - rate * (until - time))
            if left[n][1] < 1e-9:
                ended[n] = until
                del left[n]
        time = until
    return ended


@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), min_size=1, max_size=6))
def test_threads_share_the_cores_equally(cores: int, works: list[tuple[int, int]]) -> None:
    assert virtual(ends(cores, [(float(at), float(s)) for at, s in works])) == pytest.approx(by_hand(cores, works))


def test_turns_wait_in_line_for_the_driver() -> None:
    async def run() -> tuple[float, dict[str, float]]:
        host = Host(2, 0.5)
        await asyncio.gather(*(host.turn() for _ in range(6)))
        return now(), host.account()

    assert virtual(run()) == (pytest.approx(3.0), {"driver": pytest.approx(3.0), "engines": 0.0, "trainer": 0.0})


@pytest.mark.parametrize(("cores", "took"), [(1, 4.0), (2, 3.0)])
def test_the_driver_is_a_thread_like_any_other(cores: int, took: float) -> None:
    async def run() -> float:
        host = Host(cores, 1.0)
        trainer = asyncio.create_task(host.compute("trainer", 1.0))
        await asyncio.gather(*(host.turn() for _ in range(3)))
        await trainer
        return now()

    assert virtual(run()) == pytest.approx(took)


def test_a_cancelled_thread_gives_its_part_back() -> None:
    async def run() -> tuple[float, list[float]]:
        host, heard = Host(1, 0.0), []
        note: Callable[[], None] = lambda: heard.append(host.slowdown)  # noqa: E731
        host.tell(note)
        other = asyncio.create_task(host.compute("engines", 10.0))
        going = asyncio.create_task(host.compute("trainer", 2.0))
        await asyncio.sleep(2.0)  # each has computed a second
        other.cancel()
        await going
        return now(), heard

    assert virtual(run()) == (pytest.approx(3.0), [2.0, 1.0])
