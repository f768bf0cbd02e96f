"""What passes between a loop and a worker process: frames of MessagePack, a length before each. Never pickle.

Invariant: every request gets one reply of the same incarnation; anything else ends the process
(test_envmanager_subprocess.py::test_a_worker_that_talks_nonsense_is_ended).
"""

import os
from typing import Any, Literal

import msgspec

from envmanager.errors import (
    DataError,
    DeadlineExceeded,
    InfrastructureError,
    PolicyError,
    RewardError,
    RolloutError,
)

HEADER_BYTES = 4
# Observations are a few megabytes at most; a longer length is a broken stream.
LARGEST_FRAME = 256 << 20


FAILURES: dict[str, type[RolloutError]] = {
    failure.kind: failure for failure in (DataError, DeadlineExceeded, InfrastructureError, PolicyError, RewardError)
}

Call = Literal["load", "make", "reset", "step", "close", "score"]


class Order(msgspec.Struct, array_like=True, frozen=True):
    """One worker, of a nursery: the bound on its data in bytes (0 is none), and where it is to be in a sandbox, the
    variables to set there.
    """

    memory: int
    sandbox: dict[str, str] | None = None


class Ask(msgspec.Struct, array_like=True, frozen=True):
    """`load` for a process; then the calls of an incarnation's environment, or `score` for a reward function."""

    incarnation: int
    call: Call
    argument: Any


# In place of a failure's kind: the caller is to ask again, since the call goes on, or waits for room.
PENDING = "pending"


class Told(msgspec.Struct, array_like=True, frozen=True):
    """What the call gave, or its failure: the kind of a RolloutError and its message."""

    incarnation: int
    value: Any = None
    kind: str = ""
    error: str = ""


def opened(told: Told) -> Any:
    """The value of a reply, or the failure that it is."""
    if told.kind:
        raise FAILURES.get(told.kind, DataError)(told.error)
    return told.value


def frame(message: Ask | Told) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(HEADER_BYTES, "little") + body


def read_exactly(fd: int, count: int) -> bytes:
    """Blocks for `count` bytes; fewer at the end of the stream."""
    parts = []
    while count and (part := os.read(fd, min(count, 1 << 20))):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
