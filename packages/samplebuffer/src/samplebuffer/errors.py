"""Every error of the package, each with the one occasion that raises it. An error leaves the buffer as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from samplebuffer.values import Ledger


class SampleBufferError(Exception):
    """The base of every error of this package. Never raised itself."""


class InvalidConfig(SampleBufferError, ValueError):
    """Raised when an argument has a value that can not work; names it."""

    def __init__(self, field: str, value: object, remedy: str) -> None:
        super().__init__(field, value, remedy)
        self.field = field
        self.value = value
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.field}={self.value!r}: {self.remedy}"


class InvalidState(SampleBufferError, ValueError):
    """Raised when `restore` is given what is not the state of a buffer, or one of another format."""


class Unsavable(SampleBufferError, TypeError):
    """Raised by `state_dict` when a key or a payload can not be written down; names it, and the remedy."""


class VersionWentBack(SampleBufferError, ValueError):
    """Raised when `advance` is given a version below the served one."""

    def __init__(self, version: object, served: int) -> None:
        super().__init__(version, served)
        self.version = version
        self.served = served

    def __str__(self) -> str:
        return f"advance({self.version!r}): generation already serves version {self.served}; versions only go up"


class Closed(SampleBufferError):
    """Raised when a ticket or a batch is asked of a closed buffer, and in every waiter when it closes."""


class Exhausted(Closed):
    """Raised by `next_ticket` when the tasks have ended and every group has left: no ticket can ever come."""


class Starved(SampleBufferError):
    """Raised by `get_batch` when the tasks have ended and the groups left can not fill a batch."""

    def __init__(self, reason: str, ledger: Ledger) -> None:
        super().__init__(reason, ledger)
        self.reason = reason
        self.ledger = ledger

    def __str__(self) -> str:
        return f"{self.reason}; ledger: {self.ledger}"


class TicketError(SampleBufferError):
    """The base of the errors of one ticket; carries its id and state. Never raised itself."""

    def __init__(self, ticket_id: int, state: str, problem: str) -> None:
        super().__init__(ticket_id, state, problem)
        self.ticket_id = ticket_id
        self.state = state
        self.problem = problem

    def __str__(self) -> str:
        return f"ticket {self.ticket_id} ({self.state}): {self.problem}"


class AlreadyStamped(TicketError):
    """Raised when a running ticket is stamped a second time."""


class StampOutOfRange(TicketError, ValueError):
    """Raised when a stamp is below the version served at issue, or above the version served now."""


class NotStamped(TicketError):
    """Raised when a running ticket is finished before its first generation stamped it."""


class InvalidReward(TicketError, ValueError):
    """Raised when a reward is not a finite number."""


class Unsendable(SampleBufferError):
    """Raised by the Ray face when a payload can not be put into Ray's store; the ticket still runs."""


class RemoteError(SampleBufferError):
    """Raised by the Ray face when code given to the actor (`keep`) raised there; carries its text."""


class BufferLost(Closed):
    """Raised by the Ray face, in every waiter, when the actor that holds the buffer has died."""
