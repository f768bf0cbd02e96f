"""How a worker's methods say by which of a cluster's workers they are served.

A decorator only marks its function, which stays callable as it is; `Cluster` reads the marks. One method may carry
several: `register` and `register_serverless` combine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, get_args

import msgspec

Mode = Literal["execute_all", "execute_rank_zero", "dp_dispatch", "round_robin"]
F = TypeVar("F", bound=Callable[..., Any])
_MARKS = "__rollart__"


class Serverless(msgspec.Struct, frozen=True):
    """A worker's attribute that stands for the function behind `url`."""

    attr: str
    url: str


class Marks(msgspec.Struct, frozen=True):
    """What the decorators of a method say."""

    mode: Mode = "round_robin"
    affinity: Mapping[str, str] = {}
    serverless: Serverless | None = None
    idempotent: bool = False


def register(mode: Mode = "round_robin", *, idempotent: bool = False) -> Callable[[F], F]:
    """Make a method callable on the cluster.

    `execute_all` calls every worker and gives the list of results, by rank. `execute_rank_zero` calls the first.
    `dp_dispatch` splits lists, and whatever has a `shard(rank, size)` method, over the data-parallel ranks and joins
    what the collecting ranks return. `round_robin` calls one worker, in turn. A call is repeated on a restarted
    worker only when it is `idempotent`.
    """
    if mode not in get_args(Mode):
        raise ValueError(f"mode={mode!r} must be one of {', '.join(get_args(Mode))}")
    return _marking(mode=mode, idempotent=idempotent)


def hw_mapping(hw_affinity: Mapping[str, str]) -> Callable[[F], F]:
    """Route a method to workers on the hardware class of its request's `tag_name` (or `task`).

    `hw_affinity` maps tags to classes; `default` serves the tags that it does not name.
    """
    if not hw_affinity:
        raise ValueError("hw_affinity={} must map at least one tag, or 'default', to a hardware class")
    return _marking(affinity=dict(hw_affinity))


def register_serverless(attr: str, url: str) -> Callable[[F], F]:
    """Let the method use `self.<attr>(value)`, an awaitable call of the serverless function at `url`."""
    if not attr.isidentifier():
        raise ValueError(f"attr={attr!r} must be the name of an attribute")
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"url={url!r} must begin with http:// or https://")
    return _marking(serverless=Serverless(attr, url))


def _marking(**changes: Any) -> Callable[[F], F]:
    def mark(function: F) -> F:
        marks = msgspec.structs.replace(marks_of(function) or Marks(), **changes)
        setattr(function, _MARKS, marks)
        return function

    return mark


def marks_of(function: Any) -> Marks | None:
    """The marks of a method, or None when no decorator has been applied."""
    return getattr(function, _MARKS, None)


def affinity_of(method: Any) -> dict[str, str]:
    """The table of `hw_mapping`. The proxy's AffinityRouter is made from it, so that there is one routing table."""
    marks = marks_of(method)
    if marks is None or not marks.affinity:
        raise ValueError(f"{getattr(method, '__qualname__', method)} is not decorated with hw_mapping")
    return dict(marks.affinity)


def marked_methods(worker_cls: type) -> dict[str, Marks]:
    """The methods of a worker class that a cluster offers."""
    names = [name for name in dir(worker_cls) if not name.startswith("_")]
    found = {name: marks_of(getattr(worker_cls, name)) for name in names}
    return {name: marks for name, marks in found.items() if marks is not None}
