"""The errors that the functions' answers mean, with what to do about them."""

from collections.abc import Sequence
from typing import Any

from resmgr import wire
from resmgr.amounts import to_units
from resmgr.errors import BindTimeout, EventsLost, Infeasible, ResmgrError, StaleBinding, UnknownHardware
from resmgr.values import Binding, Request


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
