"""A snapshot of the store as values."""

from collections.abc import Iterator
from typing import Any

import msgspec

from resmgr import wire
from resmgr.amounts import UNIT, to_units
from resmgr.values import Binding


class PoolStatus(msgspec.Struct, frozen=True):
    name: str
    hardware: str
    backend: str
    total: float
    free: float
    nodes: int


class Waiting(msgspec.Struct, frozen=True):
    id: str
    role: str
    amount: float
    classes: tuple[str, ...]
    priority: int


class Status(msgspec.Struct, frozen=True):
    """`leases` are the seconds that sessions have left; `notes` what was annotated to bindings; `position` is the
    id of the last event; `counts` say how often each kind of event happened.
    """

    pools: tuple[PoolStatus, ...]
    bindings: tuple[Binding, ...]
    waiting: tuple[Waiting, ...]
    leases: dict[str, float]
    notes: dict[str, dict[str, str]]
    counts: dict[str, int]
    position: int
    ttl: float
    schema: str


SCHEMA = "2"

_waiter = msgspec.msgpack.Decoder(tuple[str, str, int, tuple[str, ...], int])
_note = msgspec.msgpack.Decoder(dict[str, str])


def _pairs(flat: list[bytes]) -> Iterator[tuple[str, bytes]]:
    return zip((name.decode() for name in flat[::2]), flat[1::2], strict=True)


def read_status(answer: list[Any]) -> Status:
    _, (schema, ttl, clock), last, pools, room, bindings, waiters, leases, notes, counts = answer
    free: dict[str, int] = {}
    for whole, shares in zip(room[::2], room[1::2], strict=True):
        for place, units in _pairs(whole):
            free[place] = free.get(place, 0) + int(units) * UNIT
        for member, milli in _pairs(shares):
            place = member.partition("\n")[0]
            free[place] = free.get(place, 0) + int(milli)
    return Status(
        pools=tuple(sorted((_pool(packed, free) for _, packed in _pairs(pools)), key=lambda p: (p.hardware, p.name))),
        bindings=tuple(
            sorted((wire.binding_of(key, packed) for key, packed in _pairs(bindings)), key=lambda b: b.token)
        ),
        waiting=tuple(_waiting(packed) for packed in waiters),
        leases={key: (int(end) - int(clock)) / 1000 for key, end in _pairs(leases)},
        notes={key: _note.decode(note) for key, note in _pairs(notes)},
        position=int(last.partition(b"-")[2]),
        counts={kind: int(count) for kind, count in _pairs(counts)},
        ttl=int(ttl or 0) / 1000,
        schema=(schema or b"").decode(),
    )


def _pool(packed: bytes, free: dict[str, int]) -> PoolStatus:
    pool = wire.decode_pool(packed)
    places = pool.places()
    return PoolStatus(
        name=pool.name,
        hardware=pool.hardware,
        backend=pool.backend,
        total=to_units(sum(milli for _, milli, _ in places)),
        free=to_units(sum(free.get(place, 0) for place, _, _ in places)),
        nodes=len(places),
    )


def _waiting(packed: bytes) -> Waiting:
    key, role, milli, classes, priority = _waiter.decode(packed)
    return Waiting(id=key, role=role, amount=to_units(milli), classes=classes, priority=priority)
