"""What clients and the actor say to each other: plain values, many to a message.

Payloads are not among them: a message carries references to objects of Ray's store, and says which payload is where.
"""

from __future__ import annotations

from typing import Any

import msgspec

from samplebuffer import errors
from samplebuffer.values import Reason


class Ask(msgspec.Struct, tag="ask", array_like=True):
    """Give me so many more tickets, each as soon as it is my turn."""

    count: int


class Withdraw(msgspec.Struct, tag="withdraw", array_like=True):
    """Nobody waits for this ticket any more."""

    ticket: int


class Stamp(msgspec.Struct, tag="stamp", array_like=True):
    """This version generated the first token."""

    ticket: int
    version: int


class Finish(msgspec.Struct, tag="finish", array_like=True):
    """The trajectory is done; its payload is item `item` of pack `pack` of this message, if it has one."""

    ticket: int
    reward: float
    length: int | None
    pack: int = -1
    item: int = -1


class Lose(msgspec.Struct, tag="lose", array_like=True):
    """The ticket comes back: failed, or else cancelled."""

    ticket: int
    failed: bool
    error: str


Command = Ask | Withdraw | Stamp | Finish | Lose


class TicketInfo(msgspec.Struct, frozen=True, array_like=True):
    """A ticket as a value."""

    id: int
    key: Any
    group_id: int
    member: int
    issued_version: int


class Refusal(msgspec.Struct, tag="refusal"):
    """An error of the package, as a value."""

    error: str
    args: list[Any]

    def to_error(self) -> errors.SampleBufferError:
        """The error, to be raised where the call was made."""
        kind: type[errors.SampleBufferError] = getattr(errors, self.error)
        return kind(*self.args)


Answer = Refusal | str | bool | None


class Ended(msgspec.Struct, array_like=True):
    """A running ticket that the buffer ended."""

    ticket: int
    reason: Reason


class Events(msgspec.Struct, array_like=True):
    """What happened for one client: tickets granted, tickets ended, and the end of all tickets.

    Numbered, because two replies may overtake each other. A greater `joined` than before says that the actor had
    given the client up, and knows none of its tickets. `asking` is how many tickets it waits for.
    """

    joined: int
    number: int
    asking: int = 0
    granted: list[TicketInfo] = []
    ended: list[Ended] = []
    over: Refusal | None = None


class Reply(msgspec.Struct, array_like=True):
    """The answers to the commands of a message, in order, and what happened meanwhile."""

    answers: list[Answer]
    events: Events


encode = msgspec.msgpack.Encoder().encode
decode_commands = msgspec.msgpack.Decoder(list[Command]).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
decode_events = msgspec.msgpack.Decoder(Events).decode


def refusal(error: Exception) -> Refusal:
    """An error as a value; one that is not of the package keeps its text."""
    if isinstance(error, errors.SampleBufferError):
        return Refusal(type(error).__name__, list(error.args))
    return Refusal("RemoteError", [f"{type(error).__name__}: {error}"])
