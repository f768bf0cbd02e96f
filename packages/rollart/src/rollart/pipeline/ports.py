"""What the controller drives, as small protocols: it knows no engine, no store and no Ray."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec


class Ack(Protocol):
    """A worker's word that it serves a version, with the digest of the bytes it loaded."""

    @property
    def worker(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def digest(self) -> str: ...
    @property
    def error(self) -> str:
        """Why it does not, or empty."""
        ...


class Gateway(Protocol):
    """The generation side: `Proxies`."""

    async def suspend(self) -> None: ...
    async def update(self, version: int) -> Sequence[Ack]: ...
    async def resume(self) -> None: ...


class Buffer(Protocol):
    """The sample buffer's consumer side."""

    async def get_batch(self, *, trainer_version: int, cancel_spares: bool, rest: bool) -> Any:
        """Whole groups. With `cancel_spares` all others end, and no trajectory is issued after them until `advance`;
        with `rest` none is issued until `advance` or `wake`."""
        ...

    def wake(self) -> None: ...

    def advance(self, version: int) -> Sequence[Any]: ...


class Push(msgspec.Struct, frozen=True):
    """One publication: seconds from the trainer to the store, bytes, and the digest of the content.

    `ranks` are the bytes that each rank of the trainer published, where it has several.
    """

    version: int
    seconds: float
    nbytes: int
    digest: str
    ranks: tuple[int, ...] = ()


class Trained(msgspec.Struct, frozen=True):
    """One train step: the version it made and its metrics."""

    version: int
    metrics: dict[str, float]


class Trainer(Protocol):
    """The training side."""

    @property
    def version(self) -> int:
        """The version of the trainer's own weights."""
        ...

    async def train_step(self, batch: Any, step: int) -> Trained: ...
    async def publish(self, version: int) -> Push: ...


class Probe(Protocol):
    """Compares engine and trainer on the same tokens; both hold `version` when it is called.

    None when there is no engine left to ask.
    """

    async def measure(self, version: int) -> float | None: ...


class Puller(Protocol):
    """A worker that stages a published version on its host while it goes on generating."""

    @property
    def id(self) -> str: ...
    async def prefetch(self, version: int) -> None: ...
