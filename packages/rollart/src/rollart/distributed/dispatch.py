"""Which workers serve a call, and with which arguments: pure functions.

Order is kept: results follow the ranks, joined lists the order of the list that was split
(tests/rollart/test_rollart_distributed_values.py::test_shares_are_joined_in_order).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from rollart.distributed.worker import Layout

Args = tuple[tuple[Any, ...], dict[str, Any]]


class Plan(msgspec.Struct, frozen=True):
    """Ranks to call, each with its arguments, and what makes one result of theirs."""

    calls: Sequence[tuple[int, Args]]
    join: Callable[[list[Any]], Any]


def execute_all(size: int, args: Args) -> Plan:
    return Plan([(rank, args) for rank in range(size)], list)


def execute_one(rank: int, args: Args) -> Plan:
    return Plan([(rank, args)], _only)


def dp_dispatch(layouts: Sequence[Layout], args: Args) -> Plan:
    """Every worker gets its data-parallel share; the collecting ones' results are joined in the order of shares."""
    collecting = sorted((layout.dp_rank, rank) for rank, layout in enumerate(layouts) if layout.collects)
    ranks = [rank for _, rank in collecting]

    def join(results: list[Any]) -> Any:
        wanted = [results[rank] for rank in ranks]
        if all(isinstance(result, list) for result in wanted):
            return [item for result in wanted for item in result]
        return wanted

    return Plan([(rank, _share(args, layout)) for rank, layout in enumerate(layouts)], join)


def _only(results: list[Any]) -> Any:
    return results[0]


def _share(args: Args, layout: Layout) -> Args:
    positional, named = args
    return (
        tuple(shard(value, layout.dp_rank, layout.dp_size) for value in positional),
        {name: shard(value, layout.dp_rank, layout.dp_size) for name, value in named.items()},
    )


def shard(value: Any, rank: int, size: int) -> Any:
    """The `rank`-th of `size` contiguous shares, of nearly equal lengths; what cannot be split goes to all whole."""
    if hasattr(value, "shard"):
        return value.shard(rank, size)
    if isinstance(value, list):
        return value[len(value) * rank // size : len(value) * (rank + 1) // size]
    return value


def tag_of(request: Any) -> str:
    """The name by which affinity is chosen: the request's `tag_name`, else its `task`, else `default`."""
    for field in ("tag_name", "task"):
        tag = request.get(field) if isinstance(request, Mapping) else getattr(request, field, None)
        if isinstance(tag, str):
            return tag
    return "default"
