"""What a user subclasses to put work on a cluster's processes."""

from __future__ import annotations

from collections.abc import Awaitable

import msgspec


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Who a worker is and where it runs."""

    name: str
    role: str
    rank: int = 0
    world_size: int = 1
    backend: str = ""
    hardware: str = "cpu"
    node: str = ""
    binding: str = ""
    """The id of the resource manager's binding that it runs on."""
    fell_back: bool = False
    """Whether that binding is on a fallback class."""


class Layout(msgspec.Struct, frozen=True):
    """A worker's place in its backend's parallel layout.

    Workers of one `dp_rank` are given the same share of a batch; results are taken from those with `collects`.
    """

    dp_rank: int
    dp_size: int
    collects: bool = True


class Worker:
    """One process of a cluster. `info` is there before `__init__` runs; methods may be plain or async.

    Plain methods run one at a time, all in the same thread; async ones run concurrently on the process's event loop.
    """

    info: WorkerInfo

    @property
    def rank(self) -> int:
        return self.info.rank

    @property
    def world_size(self) -> int:
        return self.info.world_size

    @property
    def layout(self) -> Layout:
        """Plain data parallelism; a backend with tensor or pipeline parallel ranks says otherwise."""
        return Layout(self.rank, self.world_size)

    def setup(self) -> Awaitable[None] | None:
        """Initialize the backend. The cluster has started when every worker's setup has returned."""
        return None

    def close(self) -> Awaitable[None] | None:
        """Let go of what setup made, before the process ends."""
        return None
