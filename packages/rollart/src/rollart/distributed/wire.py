"""What travels between a RayWorker and its GenerationHost: lists of commands one way, of answers the other."""

from __future__ import annotations

from typing import Literal

import msgspec

from llmproxy.values import GenerateRequest, GenerateResult, Partial
from llmproxy.worker import Role
from rollart.distributed.line import Address


class Generate(msgspec.Struct, frozen=True, array_like=True, tag=0):
    slot: int
    request: GenerateRequest


class Tell(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Abort or interrupt a request; answered when the engine has been told."""

    slot: int
    what: Literal["abort", "interrupt"]
    request_id: str


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The caller of this slot has gone. Not answered."""

    slot: int


class Done(msgspec.Struct, frozen=True, array_like=True, tag=0):
    slot: int
    result: GenerateResult


class Stopped(msgspec.Struct, frozen=True, array_like=True, tag=1):
    slot: int
    partial: Partial


class Told(msgspec.Struct, frozen=True, array_like=True, tag=2):
    slot: int


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """`error` is the exception as `carry` packs it."""

    slot: int
    line: str
    trace: str
    error: bytes


Command = Generate | Tell | Cancel
Answer = Done | Stopped | Told | Failed


class Client(msgspec.Struct, frozen=True):
    """A new client of a GenerationHost: its number, and where its line is expected."""

    number: int
    address: Address


class Description(msgspec.Struct, frozen=True):
    """What a worker says of itself once it has started."""

    role: Role
    version: int | None
    context_limit: int


decode_commands = msgspec.msgpack.Decoder(list[Command]).decode
decode_answers = msgspec.msgpack.Decoder(list[Answer]).decode
