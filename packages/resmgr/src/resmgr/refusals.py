"""The errors that the functions' answers mean, with what to do about them."""

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


def timed_out(request: Request, timeout: float | None) -> BindTimeout:
    wanted = f"{request.amount:g} of {'/'.join([*request.prefer, *request.fallback])} for {request.role!r}"
    if timeout == 0:
        return BindTimeout(f"{wanted} is not free now, and timeout=0 does not wait")
    return BindTimeout(f"{wanted} did not become free within {timeout} s")


def refusal(answer: list[Any], request: Request, target: str) -> ResmgrError:
    match answer:
        case [b"unknown", name, known]:
            names = ", ".join(sorted(part.decode() for part in known)) or "none: register a pool first"
            return UnknownHardware(f"no pool has hardware class {name.decode()!r}; known are {names}")
        case [b"infeasible", report]:
            found = "; ".join(_what_fits(*row) for row in wire.decode_report(report))
            return Infeasible(f"{request.amount:g} for {request.role!r} can never be granted: {found}")
        case [b"busy"]:
            return timed_out(request, 0)
        case [b"stale", _]:
            return StaleBinding(f"binding {target} was released or lost meanwhile")
        case [b"changed", packed]:
            now = wire.binding_of(target, packed).amount
            return StaleBinding(f"binding {target} was changed to {now:g} meanwhile; use the manager's bindings")
    raise AssertionError(f"unknown answer {answer!r}")


def _what_fits(hardware: str, total: int, largest: int, fits: int) -> str:
    of = f"of {to_units(total):g} that match, at most {to_units(largest):g} on one node"
    return f"{hardware}: {to_units(fits):g} would fit ({of})"
