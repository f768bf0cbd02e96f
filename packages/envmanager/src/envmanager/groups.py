"""Groups of a fixed list of keys, for use without a buffer: whom to run, who won, whom to cancel.

A synchronous core; only `next_ticket` waits. Invariants:
- a complete group has exactly `group_size` winners, never fewer
  (test_envmanager_groups.py::test_groups_are_whole_or_given_up);
- a failed member is issued again within its group's budget for that kind of failure, beyond it the group is
  given up;
- when enough groups are complete, or cannot be any more, every other ticket is cancelled and `next_ticket`
  raises Closed.

Redundancy favours the quick: of `group_size + spare_members` the first finishers win. With `fair`, winners
are admitted in the order in which they started: a spare then only replaces a failed member, and a spare
group only a given-up group.
"""

import asyncio
import uuid
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

from envmanager.checks import check_count
from envmanager.errors import Closed, Kind, RolloutError
from envmanager.protocols import CancelCallback
from envmanager.values import Trajectory

T = TypeVar("T")


class Budgets(msgspec.Struct, frozen=True, kw_only=True):
    """How many failures of each kind a group survives. A data failure is likely to happen again, so it gets
    few.
    """

    infrastructure: int = 5
    timeout: int = 3
    data: int = 1
    policy: int = 3
    reward: int = 3

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            check_count(f"Budgets.{name}", getattr(self, name), 0)


class LocalTicket:
    """One member's try. Fits the Ticket protocol."""

    __slots__ = ("_callbacks", "_groups", "alive", "group_id", "id", "key", "member", "order", "reason", "version")

    def __init__(self, groups: "LocalGroups", id: str, key: str, group_id: int, member: int, order: int) -> None:
        self._groups = groups
        self._callbacks: list[CancelCallback] = []
        self.id = id
        self.key = key
        self.group_id = group_id
        self.member = member
        self.order = order
        self.alive = True
        self.reason = ""
        self.version: int | None = None

    def on_cancel(self, callback: CancelCallback) -> None:
        if self.reason:
            callback(self.reason)
        elif self.alive:
            self._callbacks.append(callback)

    def stamp(self, version: int) -> None:
        self.version = version

    def finish(self, payload: Trajectory, reward: float) -> str:
        return self._groups.finish(self, payload) if self._end() else "ended"

    def fail(self, error: Exception) -> None:
        if self._end():
            self._groups.fail(self, error)

    def cancel(self) -> None:
        if self._end():
            self._groups.drop(self)

    def end(self, reason: str) -> None:
        """Its groups want it no more."""
        callbacks = list(self._callbacks)
        if self._end():
            self.reason = reason
            for callback in callbacks:
                callback(reason)

    def _end(self) -> bool:
        was, self.alive = self.alive, False
        self._callbacks.clear()
        return was


class LocalGroup:
    """One key's members. `given_up` says why, where it was."""

    __slots__ = ("alive", "failures", "finished", "given_up", "key", "winners")

    def __init__(self, key: str) -> None:
        self.key = key
        self.alive: dict[int, LocalTicket] = {}
        self.finished: dict[int, Trajectory] = {}
        self.failures: Counter[Kind] = Counter()
        self.winners: list[Trajectory] = []
        self.given_up = ""

    @property
    def open(self) -> bool:
        return not self.winners and not self.given_up


def admitted(entries: Iterable[tuple[T | None, bool]], wanted: int, fair: bool) -> list[T] | None:
    """The first `wanted` results, or None while there are too few; entries are (result, still open) in
    start order. With `fair` nothing is admitted past an open entry.
    """
    chosen: list[T] = []
    for result, still_open in entries:
        if result is not None:
            chosen.append(result)
        elif still_open and fair:
            break
        if len(chosen) == wanted:
            return chosen
    return None


class LocalGroups:
    """Fits the Groups protocol. Of the keys given, `len(keys) - spare_groups` groups are wanted."""

    def __init__(
        self,
        keys: Sequence[str],
        *,
        group_size: int = 1,
        spare_groups: int = 0,
        spare_members: int = 0,
        fair: bool = False,
        budgets: Budgets | None = None,
    ) -> None:
        check_count("group_size", group_size, 1)
        check_count("spare_members", spare_members, 0)
        check_count("spare_groups", spare_groups, 0)
        if budgets is not None and not isinstance(budgets, Budgets):
            raise ValueError(f"budgets is {budgets!r:.100}; give Budgets")
        if not spare_groups < len(keys):
            raise ValueError(f"spare_groups is {spare_groups} of {len(keys)} keys; give more keys than spare groups")
        self.groups = [LocalGroup(key) for key in keys]
        self.wanted = len(keys) - spare_groups
        self.group_size = group_size
        self.fair = fair
        self.budgets = budgets or Budgets()
        self.closed = False
        self._name = uuid.uuid4().hex[:8]
        self._order = 0
        self._whole = 0
        self._given_up = 0
        self._wake = asyncio.Event()
        members = [(g, m) for g in range(len(keys)) for m in range(group_size + spare_members)]
        members.sort(key=lambda member: (member[0] >= self.wanted or member[1] >= group_size, member))
        self._queue = deque(members)  # what is needed first, spares after

    async def next_ticket(self) -> LocalTicket:
        """Waits until a member needs to run: at the start, or when one has failed."""
        while (ticket := self.next_nowait()) is None:
            self._wake.clear()
            await self._wake.wait()
        return ticket

    def next_nowait(self) -> LocalTicket | None:
        while self._queue and not self.closed:
            index, member = self._queue.popleft()
            group = self.groups[index]
            if group.open:
                self._order += 1
                name = f"{self._name}-{self._order}"
                ticket = LocalTicket(self, name, group.key, index, member, self._order)
                group.alive[self._order] = ticket
                return ticket
        if self.closed:
            raise Closed("the collection is complete, or cannot be any more")
        return None

    def finish(self, ticket: LocalTicket, trajectory: Trajectory) -> str:
        group = self.groups[ticket.group_id]
        del group.alive[ticket.order]
        group.finished[ticket.order] = trajectory
        self._settle(group)
        return "accepted"

    def fail(self, ticket: LocalTicket, error: Exception) -> None:
        """Issues the member again, or gives the group up."""
        group = self.groups[ticket.group_id]
        del group.alive[ticket.order]
        kind: Kind = error.kind if isinstance(error, RolloutError) else "data"
        group.failures[kind] += 1
        if group.failures[kind] > getattr(self.budgets, kind):
            group.given_up = f"{group.failures[kind]} {kind} failures, the last: {error}"
            self._given_up += 1
            self._cancel(group, "given_up")
        else:
            self._queue.append((ticket.group_id, ticket.member))
            self._wake.set()
        self._settle(group)

    def drop(self, ticket: LocalTicket) -> None:
        """Whoever ran it will not go on; the member waits for another runner."""
        group = self.groups[ticket.group_id]
        del group.alive[ticket.order]
        self._queue.append((ticket.group_id, ticket.member))
        self._wake.set()

    def complete(self) -> list[LocalGroup] | None:
        """The wanted groups, once they are there."""
        entries = ((group if group.winners else None, group.open) for group in self.groups)
        return admitted(entries, self.wanted, self.fair)

    def _settle(self, group: LocalGroup) -> None:
        """Closes the group when it has its winners, and everything when there are groups enough or hope is
        lost.
        """
        if group.open:
            orders = sorted(group.alive.keys() | group.finished.keys())
            members = ((group.finished.get(order), order in group.alive) for order in orders)
            if winners := admitted(members, self.group_size, self.fair):
                group.winners = winners
                self._whole += 1
                self._cancel(group, "surplus")
        hopeless = len(self.groups) - self._given_up < self.wanted
        if not self.closed and (hopeless or (self._whole >= self.wanted and self.complete() is not None)):
            self.closed = True
            for other in self.groups:
                self._cancel(other, "surplus")
            self._wake.set()

    def _cancel(self, group: LocalGroup, reason: str) -> None:
        alive, group.alive = group.alive, {}
        for ticket in alive.values():
            ticket.end(reason)
