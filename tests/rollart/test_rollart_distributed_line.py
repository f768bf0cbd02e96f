"""Lines between processes: order, frames, secrets, ends. Over real loopback TCP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from rollart.distributed.line import Address, Door, Line, dial


class Ear:
    """What was heard, and a way to wait for so much of it."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.frames = 0
        self._more = asyncio.Event()

    def __call__(self, frame: bytes) -> None:
        self.messages += msgspec.msgpack.decode(frame)
        self.frames += 1
        self._more.set()

    async def hears(self, count: int) -> list[Any]:
        while len(self.messages) < count:
            self._more.clear()
            await self._more.wait()
        return self.messages


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    door = Door("127.0.0.1")
    await door.open()
    yield door
    door.close()


MakeLine = Callable[[Ear], Line]


@pytest.fixture
async def line() -> AsyncIterator[MakeLine]:
    """Makes lines, which are closed in the end."""
    made: list[Line] = []

    def make(ear: Ear) -> Line:
        made.append(Line(ear))
        return made[-1]

    yield make
    for one in made:
        one.close()
    await asyncio.sleep(0)


async def pair(door: Door, line: MakeLine) -> tuple[Line, Ear, Line, Ear]:
    near, far = Ear(), Ear()
    one, other = line(near), line(far)
    await dial(one, door.expect(other))
    return one, near, other, far


async def test_messages_come_whole_and_in_order(door: Door, line: MakeLine) -> None:
    one, near, other, far = await pair(door, line)
    large = b"x" * 3_000_000
    for number in range(50):
        one.post([number, large if number % 20 == 0 else b""], linger=number % 3 == 0)
        other.post(number, linger=False)
        if number % 5 == 0:
            await asyncio.sleep(0)
    assert [number for number, _ in await far.hears(50)] == list(range(50))
    assert [len(data) for number, data in far.messages if number % 20 == 0] == [len(large)] * 3
    assert await near.hears(50) == list(range(50))
    one.close()
    await other.ended


@pytest.mark.parametrize("piece", [1, 3, 7])
async def test_frames_are_whole_however_they_are_cut(piece: int) -> None:
    ear = Ear()
    line = Line(ear)
    frames = [msgspec.msgpack.encode([n] * n) for n in range(1, 9)]
    stream = b"".join(len(frame).to_bytes(4) + frame for frame in frames)
    for start in range(0, len(stream), piece):
        line.data_received(stream[start : start + piece])
    assert ear.messages == [n for n in range(1, 9) for _ in range(n)] and ear.frames == 8


async def test_what_is_posted_together_is_one_frame(door: Door, line: MakeLine) -> None:
    one, _, _, far = await pair(door, line)
    for number in range(100):
        one.post(number, linger=True)
    await far.hears(100)
    assert one.sent == far.frames == 1


async def test_what_is_posted_before_the_line_is_up_goes_first(door: Door, line: MakeLine) -> None:
    far = Ear()
    one, other = line(Ear()), line(far)
    one.post("early", linger=False)
    await asyncio.sleep(0)
    await dial(one, door.expect(other))
    one.post("late", linger=False)
    assert await far.hears(2) == ["early", "late"]


async def test_only_the_expected_is_heard(door: Door, line: MakeLine) -> None:
    ear = Ear()
    expected = line(ear)
    address = door.expect(expected)
    for secret in (b"", b"short", bytes(32)):
        stranger = line(Ear())
        stranger.post("hello", linger=False)
        await dial(stranger, Address(address.host, address.port, secret))
        if len(secret) < 32:
            stranger.post("x" * 64, linger=False)  # is read as the rest of the secret
        await stranger.ended
    known = line(Ear())
    known.post("hello", linger=False)
    await dial(known, address)
    assert await ear.hears(1) == ["hello"]
    again = line(Ear())
    await dial(again, address)
    await again.ended
    assert ear.messages == ["hello"] and not known.ended.done()


async def test_a_later_expectation_replaces_the_first(door: Door, line: MakeLine) -> None:
    first = door.expect(line(Ear()))
    door.expect(line(Ear()))
    caller = line(Ear())
    await dial(caller, first)
    await caller.ended


async def test_after_the_end_nothing_is_sent_or_heard(door: Door, line: MakeLine) -> None:
    one, _, other, far = await pair(door, line)
    one.post("before", linger=False)
    await far.hears(1)
    other.close()
    await one.ended
    one.post("after", linger=False)
    await asyncio.sleep(0)
    assert far.messages == ["before"] and one.sent == 1
