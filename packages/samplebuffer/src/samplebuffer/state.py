"""A buffer's state as plain values, and back.

Invariants: encoding only reads, so it is consistent whenever it is called; a restored buffer holds each finished
member and each key of an unfinished group exactly once, with as many groups alive as there were
(tests/samplebuffer/test_samplebuffer_state.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from math import isfinite
from sys import maxsize
from typing import Any, Protocol

import msgspec

from samplebuffer.book import Book
from samplebuffer.core import Core, GroupEnd
from samplebuffer.errors import InvalidConfig, InvalidState, Unsavable
from samplebuffer.group import OpenGroup
from samplebuffer.limits import Limits, make_limits
from samplebuffer.tasks import Task, Tasks
from samplebuffer.values import Fate, GivenUp, Sample

FORMAT = 1


class Encodes(Protocol):
    """Turns payloads into bytes."""

    def encode(self, payload: Any) -> bytes:
        """The bytes of a payload."""
        ...


class Decodes(Protocol):
    """Turns bytes into payloads."""

    def decode(self, data: bytes) -> Any:
        """The payload of the bytes."""
        ...


class Codec(Encodes, Decodes, Protocol):
    """Both."""


class MsgpackCodec:
    """Payloads as msgpack. Without a type they come back as plain lists and dictionaries."""

    def __init__(self, payload_type: Any = Any) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(payload_type)

    def encode(self, payload: Any) -> bytes:
        """The bytes of a payload."""
        return self._encoder.encode(payload)

    def decode(self, data: bytes) -> Any:
        """The payload of the bytes."""
        return self._decoder.decode(data)


class GroupState(msgspec.Struct):
    """A group alive: its key, losses, numbers given to members, and finished samples with encoded payloads."""

    id: int
    key: Any
    lost: int
    issued: int
    samples: list[Sample]


class BufferState(msgspec.Struct):
    """Everything that a restored buffer starts from. Members that ran are counted as cancelled."""

    format: int
    limits: Limits
    version: int
    drawn: int
    waiting: list[Task]
    issued: int
    opened: int
    ended: dict[Fate, int]
    group_ends: dict[GroupEnd, int]
    given_up: list[GivenUp]
    groups: list[GroupState]


def save(core: Core, codec: Encodes) -> dict[str, Any]:
    """The state as a dictionary of builtins, payloads as bytes. What is lent has not been handed out yet: it is alive
    in the state, or, where it has grown stale on the way, its key is issued again."""
    book, ends = core.book, core.group_ends
    cut = core.limits.oldest(core.version)
    stale = [group for group in core.lent.values() if any(group.stale(cut))]
    alive = [*core.groups.values(), *(group for group in core.lent.values() if group not in stale)]
    size = core.limits.group_size
    state = BufferState(
        format=FORMAT,
        limits=core.limits,
        version=core.version,
        drawn=core.tasks.drawn,
        waiting=[*(Task(group.key, group.lost) for group in stale), *core.tasks.waiting],
        issued=book.issued,
        opened=core.opened,
        ended=book.ended
        | {
            "cancelled": book.ended["cancelled"] + book.ledger.running,
            "delivered": book.ended["delivered"] - size * len(core.lent),
            "stale": book.ended["stale"] + size * len(stale),
        },
        group_ends=ends
        | {"delivered": ends["delivered"] - len(core.lent), "recycled": ends["recycled"] + len(stale)},
        given_up=list(core.given_up),
        groups=[GroupState(g.id, g.key, g.lost, g.issued, [_encoded(s, codec) for s in g.done]) for g in alive],
    )
    try:
        builtins: dict[str, Any] = msgspec.to_builtins(state, builtin_types=(bytes,))
    except TypeError as error:
        keys = [group.key for group in state.groups] + [task.key for task in state.waiting]
        raise Unsavable(
            f"a key is no plain value ({error}); use texts, numbers or lists of them: {keys!r:.300}"
        ) from error
    return builtins


def parse(data: dict[str, Any]) -> BufferState:
    """A saved state, once it is known to be one; else InvalidState."""
    try:
        state = msgspec.convert(data, BufferState)
        make_limits(**msgspec.structs.asdict(state.limits))
    except (msgspec.ValidationError, InvalidConfig) as error:
        raise InvalidState(f"not the state of a buffer: {error}") from error
    if state.format != FORMAT:
        raise InvalidState(f"the state has format {state.format}; this version reads {FORMAT}")
    _check(state)
    return state


def load(data: dict[str, Any], keys: Iterable[Any], codec: Decodes, skip_drawn: bool, **options: Any) -> Core:
    """A core in the saved state; `options` are those of `Core` that are not saved."""
    state = parse(data)
    if skip_drawn and isinstance(keys, Iterable):  # else `Tasks` says what is wrong
        keys = islice(iter(keys), state.drawn, None)
    core = Core(
        Tasks(keys, state.waiting, state.drawn),
        state.limits,
        version=state.version,
        book=Book(state.issued, state.ended),
        **options,
    )
    core.opened = state.opened
    core.group_ends.update(state.group_ends)
    core.given_up.extend(state.given_up)
    for saved in state.groups:
        group = OpenGroup(saved.id, Task(saved.key, saved.lost))
        group.issued = saved.issued
        core.adopt(group, [_decoded(sample, codec) for sample in saved.samples])
    return core


def _check(state: BufferState) -> None:
    """What msgspec can not see: a state that no buffer was ever in."""
    limits = state.limits
    samples = [sample for group in state.groups for sample in group.samples]
    oldest = limits.oldest(state.version)
    ended = sum(state.ended.values())
    for holds, what in (
        (min(state.version, state.drawn, *state.ended.values()) >= 0, "a count is negative"),
        (state.drawn <= maxsize, "more keys were drawn than can be"),
        (state.issued == len(samples) + ended, "the ledger does not balance"),
        (len(state.groups) <= limits.capacity, "more groups than the capacity"),
        (_distinct([group.id for group in state.groups], state.opened), "a group is there twice"),
        (_distinct([sample.ticket_id for sample in samples], state.issued), "a member is there twice"),
        (all(len(g.samples) <= limits.group_size for g in state.groups), "a group has too many members"),
        (all(group.lost <= limits.max_replacements for group in state.groups), "a group has lost too many members"),
        (all(oldest <= s.start_version <= state.version for s in samples), "a member is outside the bound"),
        (all(_distinct([s.member for s in g.samples], g.issued) for g in state.groups), "a member's number is taken"),
        (all(isfinite(sample.reward) for sample in samples), "a reward is not finite"),
        (all(isinstance(sample.payload, bytes) for sample in samples), "a payload is not bytes"),
    ):
        if not holds:
            raise InvalidState(f"not the state of a buffer: {what}")


def _distinct(ids: list[int], end: int) -> bool:
    """Whether each was given once, from 0 up to `end`."""
    return len(set(ids)) == len(ids) and all(0 <= i < end for i in ids)


def encode_payload(codec: Encodes, ticket_id: int, payload: Any) -> bytes:
    """The bytes of a member's payload, or Unsavable."""
    try:
        return codec.encode(payload)
    except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
        what = f"the payload of ticket {ticket_id}"
        raise Unsavable(f"{what} can not be encoded ({error}); give state_dict(codec=...) one that can") from error


def decode_payload(codec: Decodes, ticket_id: int, data: bytes) -> Any:
    """The payload of a member's bytes, or InvalidState."""
    try:
        return codec.decode(data)
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        what = f"the payload of ticket {ticket_id}"
        raise InvalidState(f"{what} can not be decoded ({error}); give restore the codec that saved it") from error


def _encoded(sample: Sample, codec: Encodes) -> Sample:
    return msgspec.structs.replace(sample, payload=encode_payload(codec, sample.ticket_id, sample.payload))


def _decoded(sample: Sample, codec: Decodes) -> Sample:
    return msgspec.structs.replace(sample, payload=decode_payload(codec, sample.ticket_id, sample.payload))
