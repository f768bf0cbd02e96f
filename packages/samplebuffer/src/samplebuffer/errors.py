"""Every error of the package, each with the one occasion that raises it. An error leaves the buffer as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from samplebuffer.values import Ledger


class SampleBufferError(Exception):
    """The base of every error of this package. Never raised itself."""


class InvalidConfig(SampleBufferError, ValueError):
    """Raised when a constructor argument has a value that can not work."""

    def __init__(self, field: str, value: object, remedy: str) -> None:
        super().__init__(f"{field}={value!r}: {remedy}")
        self.field = field
        self.value = value


class InvalidState(SampleBufferError, ValueError):
    """Raised when `restore` is given a state that is not one, or of another format."""


class VersionWentBack(SampleBufferError, ValueError):
    """Raised when `advance` is given a version below the served one."""

    def __init__(self, version: object, served: int) -> None:
        super().__init__(f"advance({version!r}): generation already serves version {served}; versions only go up")
        self.served = served


class Closed(SampleBufferError):
    """Raised when a ticket or a batch is asked of a closed buffer, and in every waiter when it closes."""


class Exhausted(Closed):
    """Raised by `next_ticket` when the tasks have ended and every group has left: no ticket can ever come."""


class Starved(SampleBufferError):
    """Raised by `get_batch` when the tasks have ended and the groups left can not fill a batch."""

    def __init__(self, reason: str, ledger: Ledger) -> None:
        super().__init__(f"{reason}; ledger: {ledger}")
        self.reason = reason
        self.ledger = ledger


class TicketError(SampleBufferError):
    """The base of the errors of one ticket; carries its id and state. Never raised itself."""

    def __init__(self, ticket_id: int, state: str, problem: str) -> None:
        super().__init__(f"ticket {ticket_id} ({state}): {problem}")
        self.ticket_id = ticket_id
        self.state = state


class AlreadyStamped(TicketError):
    """Raised when a running ticket is stamped a second time."""


class StampOutOfRange(TicketError, ValueError):
    """Raised when a stamp is below the version served at issue, or above the version served now."""


class NotStamped(TicketError):
    """Raised when a running ticket is finished before its first generation stamped it."""


class InvalidReward(TicketError, ValueError):
    """Raised when a reward is not a finite number."""
