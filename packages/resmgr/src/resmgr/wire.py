"""How values travel to the store's functions and back: msgpack arrays in a fixed order, never pickled."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from resmgr.amounts import UNIT, to_milli, to_units
from resmgr.values import Allocation, Binding, Event, Pool, Request

encode = msgspec.msgpack.Encoder().encode


class Spec(msgspec.Struct, array_like=True):
    """A request as the functions read it: `count` chunks of `chunk` and one rest, at least `least` in all."""

    role: str
    prefer: Sequence[str]
    fallback: Sequence[str]
    count: int
    chunk: int
    tail: int
    least: int
    spread: bool
    apart: Sequence[str]
    labels: Mapping[str, str]
    priority: int
    avoid: Sequence[str]


class Record(msgspec.Struct, array_like=True):
    owner: str
    holder: str
    token: int
    hardware: str
    fell_back: int
    amount: int
    chunk: int
    role: str
    apart: list[str]
    allocs: list[Any]


class _Event(msgspec.Struct, array_like=True):
    kind: str
    binding: str
    role: str
    hardware: str
    amount: int
    token: int
    owner: str
    reason: str
    previous: str
    time: int


_record = msgspec.msgpack.Decoder(Record)
_records = msgspec.msgpack.Decoder(list[Record])
_event = msgspec.msgpack.Decoder(_Event)
decode_pool = msgspec.msgpack.Decoder(Pool).decode
decode_report = msgspec.msgpack.Decoder(list[tuple[str, int, int, int]]).decode


def spec_of(request: Request, amount: int | None = None) -> bytes:
    """`amount` (thousandths) replaces the request's, whole: the part by which a binding grows."""
    total = to_milli("Request.amount", request.amount) if amount is None else amount
    least = total if request.min_amount is None or amount is not None else to_milli("min_amount", request.min_amount)
    chunk = min(total, UNIT) if request.chunk is None else to_milli("Request.chunk", request.chunk)
    return encode(
        Spec(
            role=request.role,
            prefer=request.prefer,
            fallback=request.fallback,
            count=total // chunk,
            chunk=chunk,
            tail=total % chunk,
            least=least,
            spread=request.spread,
            apart=request.apart,
            labels=request.labels,
            priority=request.priority,
            avoid=request.avoid,
        )
    )


def pool_bytes(pool: Pool) -> tuple[bytes, bytes]:
    """The definition, equal for equal pools, and its places as a flat list."""
    nodes = [msgspec.structs.replace(node, total=float(node.total)) for node in pool.nodes]
    ordered = msgspec.structs.replace(
        pool, total=float(pool.total), nodes=sorted(nodes, key=lambda node: node.name)
    )  # 2 and 2.0 are equal, and are written differently
    flat = [part for place in pool.places() for part in place]
    return msgspec.msgpack.encode(ordered, order="sorted"), encode(flat)


def binding_of(identity: str, packed: bytes) -> Binding:
    return _binding(identity, _record.decode(packed))


def bindings_of(identities: Sequence[str], granted: bytes) -> list[Binding]:
    """What an answer grants, in the order in which it was asked for."""
    return [_binding(key, record) for key, record in zip(identities, _records.decode(granted), strict=True)]


def _binding(identity: str, record: Record) -> Binding:
    return Binding(
        id=identity,
        role=record.role,
        hardware=record.hardware,
        fell_back=bool(record.fell_back),
        amount=to_units(record.amount),
        chunk=to_units(record.chunk),
        token=record.token,
        allocations=tuple(_allocations(record.allocs)),
        owner=record.owner,
        holder=record.holder,
    )


def _allocations(flat: list[Any]) -> list[Allocation]:
    found = []
    for place, slot, milli in zip(flat[::3], flat[1::3], flat[2::3], strict=True):
        pool, _, node = place.partition("/")
        found.append(Allocation(pool=pool, node=node, amount=to_units(milli), slot=slot))
    return found


def whole_places(binding: Binding) -> bytes:
    """Where a binding was, for the functions; empty if it had a fraction, which cannot be asked for by name."""
    if any(a.slot for a in binding.allocations):
        return encode([])
    places: dict[str, int] = {}
    for a in binding.allocations:
        place = f"{a.pool}/{a.node}" if a.node else a.pool
        places[place] = places.get(place, 0) + round(a.amount * UNIT)
    return encode([part for place, milli in places.items() for part in (place, "", milli)])


def event_of(number: int, packed: bytes) -> Event:
    raw = _event.decode(packed)
    fields = {name: getattr(raw, name) for name in raw.__struct_fields__}
    return Event(**{**fields, "id": number, "amount": to_units(raw.amount), "time": raw.time / 1000})
