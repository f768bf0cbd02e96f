"""The errors that the functions' answers mean, with what to do about them."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from resmgr import wire
from resmgr.amounts import to_units
from resmgr.errors import (
    BindTimeout,
    EventsLost,
    Infeasible,
    PoolMismatch,
    ResmgrError,
    StaleBinding,
    UnknownHardware,
)
from resmgr.values import Binding, Node, Pool, Request

MOST_DIFFERENCES = 10


def stale(binding: Binding, answer: list[Any]) -> StaleBinding:
    now = answer[1].decode()
    what = f"was granted again under token {now}" if now else "was released or lost"
    return StaleBinding(f"binding {binding.id} (token {binding.token}) {what}; bind again or use the new one")


def events_lost(last: int, first: int) -> EventsLost:
    return EventsLost(f"events after {last} are gone, the next is {first}; read status() and watch from its position")


def wanted_by(request: Request) -> str:
    return f"{request.amount:g} of {'/'.join([*request.prefer, *request.fallback])} for {request.role!r}"


def timed_out(requests: Sequence[Request], timeout: float | None) -> BindTimeout:
    wanted = " with ".join(wanted_by(request) for request in requests)
    if timeout == 0:
        return BindTimeout(f"{wanted} is not free now, and timeout=0 does not wait")
    return BindTimeout(f"{wanted} did not become free within {timeout} s")


def refusal(answer: list[Any], requests: Sequence[Request], target: str) -> ResmgrError:
    match answer:
        case [b"unknown", name, known]:
            names = ", ".join(sorted(part.decode() for part in known)) or "none: register a pool first"
            return UnknownHardware(f"no pool has hardware class {name.decode()!r}; known are {names}")
        case [b"infeasible", report, index]:
            return _infeasible(wire.decode_report(report), requests, index)
        case [b"busy"]:
            return timed_out(requests, 0)
        case [b"stale", _]:
            return StaleBinding(f"binding {target} was released or lost meanwhile")
        case [b"changed", packed]:
            (now,) = wire.bindings_of([target], packed)
            return StaleBinding(
                f"binding {target} was changed to {now.amount:g} meanwhile; use the manager's bindings"
            )
    raise AssertionError(f"unknown answer {answer!r}")


def _infeasible(report: list[tuple[str, int, int, int]], requests: Sequence[Request], index: int) -> Infeasible:
    if not report:
        each = " with ".join(wanted_by(request) for request in requests)
        return Infeasible(
            f"each would fit alone, but never all together: {each}; ask for less, add fallbacks, or bind one by one"
        )
    found = "; ".join(_what_fits(*row) for row in report)
    return Infeasible(f"{requests[index].amount:g} for {requests[index].role!r} can never be granted: {found}")


def _what_fits(hardware: str, total: int, largest: int, fits: int) -> str:
    of = f"of {to_units(total):g} that match, at most {to_units(largest):g} on one node"
    return f"{hardware}: {to_units(fits):g} would fit ({of})"


def mismatch(there: Pool, asked: Pool) -> PoolMismatch:
    """Names what differs, not what the pools have in common."""
    differences = _differences(there, asked)
    named = "; ".join(islice(differences, MOST_DIFFERENCES))
    more = sum(1 for _ in differences)
    rest = f"; and {more} more" if more else ""
    return PoolMismatch(
        f"pool {asked.name!r} is registered with {named}{rest}; use another name, or register(pool, replace=True)"
    )


def _differences(there: Pool, asked: Pool) -> Iterator[str]:
    yield from _fields(there, asked, ("hardware", "total", "backend", "labels"))
    old, new = _by_name(there), _by_name(asked)
    for name in {**old, **new}:
        if name not in new:
            yield f"a node {name!r}, which is missing now"
        elif name not in old:
            yield f"no node {name!r}"
        else:
            yield from (f"node {name!r}: {what}" for what in _fields(old[name], new[name], ("total", "labels")))


def _by_name(pool: Pool) -> Mapping[str, Node]:
    return {node.name: node for node in pool.nodes}


def _fields(there: Pool | Node, asked: Pool | Node, names: Sequence[str]) -> Iterator[str]:
    for name in names:
        old, new = getattr(there, name), getattr(asked, name)
        if old != new:
            yield f"{name}={old!r:.200}, not {new!r:.200}"
