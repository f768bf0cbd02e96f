"""Values that mean nothing are refused by name, and leave the buffer as it was."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import Any

import pytest

from samplebuffer import InvalidConfig, InvalidState, SampleBuffer, Unsavable


def made(**given: Any) -> SampleBuffer:
    values: dict[str, Any] = {"tasks": range(9), "batch_groups": 1, "group_size": 1} | given
    return SampleBuffer(**values)


def with_one(key: Any = 1, payload: Any = "text") -> SampleBuffer:
    """With one finished member of the key."""
    buffer = made(tasks=[key, 2])
    ticket = buffer.next_ticket_nowait()
    assert ticket is not None
    ticket.stamp(0)
    assert ticket.finish(payload, 1.0) == "accepted"
    return buffer


async def keys() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("group_size", "x"),
        ("group_size", None),
        ("spare_members", "x"),
        ("max_replacements", 1.5),
        ("evict", "no"),
        ("keep", 3),
        ("length", "x"),
        ("tasks", None),
        ("tasks", 3),
        ("tasks", keys()),
    ],
)
def test_arguments(field: str, value: Any) -> None:
    with pytest.raises(InvalidConfig, match=f"{field}="):
        made(**{field: value})


@pytest.mark.parametrize("value", ["x", math.nan, True])
async def test_timeouts(value: Any) -> None:
    with pytest.raises(InvalidConfig, match="timeout="):
        await made().get_batch(value)


def test_what_cannot_be_saved_is_named() -> None:
    with pytest.raises(Unsavable, match="key is no plain value"):
        with_one(key=object()).state_dict()
    for payload in (object(), "\udcff", 1 << 100):
        with pytest.raises(Unsavable, match="payload of ticket 0"):
            with_one(payload=payload).state_dict()


def test_a_state_that_cannot_be_read_is_refused() -> None:
    state = with_one().state_dict()
    with pytest.raises(InvalidState, match="more keys"):
        SampleBuffer.restore(state | {"drawn": 1 << 63}, [1])
    tasks: Any = None
    with pytest.raises(InvalidConfig, match="tasks="):
        SampleBuffer.restore(state, tasks)
    state["groups"][0]["samples"][0]["payload"] = b"\xc1"
    with pytest.raises(InvalidState, match="payload of ticket 0 can not be decoded"):
        SampleBuffer.restore(state, [1, 2])
