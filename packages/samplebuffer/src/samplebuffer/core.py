"""The rules of the buffer as a synchronous state machine: no task, no client, no clock, no waiting.

A *group* is opened for one key when there is room, and lives until it is delivered, filtered, given up or recycled.

| what happens | to whom | ledger column | what follows |
|---|---|---|---|
| `finish` | a running member | buffered | with `group_size` of them the group is complete and `keep` judges it |
| the group is complete | its running members | surplus | cancelled; spares not issued yet never are |
| `keep` says no | all members of the group | filtered | the group leaves; its room is free at once |
| `fail`, `cancel` | a running member | failed, cancelled | replaced; counted in the budget of the group |
| the budget is passed | the members left | failed | the group leaves, recorded as `GivenUp`; running ones cancelled |
| `advance` past the bound | each stale member | stale | replaced; running ones cancelled; not counted in the budget |
| fewer than half would stay | all members | stale | the group is recycled: its key is the next to be opened |
| `cancel_spares` | all members of all groups | surplus | every group is recycled; no ticket until `advance` |
| `take_batch` | the groups of the batch | delivered | the oldest start first; `rest`: no ticket until `advance` |
| `close` | running members | cancelled | finished members stay, for `state_dict` |

A group is *wanting* `group_size + spare_members - running - buffered` tickets while it is incomplete. Replacement is
nothing but this difference, so a member lost for several reasons at once is replaced exactly once.

**The bound.** Let n be the served version, and b a member's start version, or the version served at its issue until
the stamp. Claim: between operations every alive member has `n - b <= ceil(alpha)`. (1) It is issued with b = n.
(2) `stamp` only raises b (a lower stamp is refused), and not beyond n. (3) n changes in `advance` only, which ends
every member with b < n - ceil(alpha) before it returns. (4) `finish` keeps b. A batch holds alive members only and
is formed in one operation, so the bound holds at hand-out, whatever time was spent running or queued. It is a
property of the buffer alone: no admission policy is part of the argument. `evict=False` gives (3) up, and the bound.

**The capacity.** A group is opened only while `alive < capacity = floor((1 + alpha) * batch_groups) + spare_groups`,
and nothing else adds one (`restore` brings back as many as were alive). So pending trajectories number at most
`capacity * (group_size + spare_members)`. With S = `batch_groups * group_size` a batch and fixed spares this is
O((1 + alpha) * S); with a batch's worth of environments (E = S) and alpha >= 1, 1 + alpha <= 2 alpha: O(alpha * E).
Without these premises only the first form holds.

Held by tests/samplebuffer/test_samplebuffer_machine.py, which checks every claim after every operation.
"""

from __future__ import annotations

import logging
from asyncio import CancelledError
from collections import deque
from collections.abc import Callable, Sequence
from math import isfinite
from operator import index
from typing import Any, Literal

from samplebuffer.book import Book
from samplebuffer.errors import (
    AlreadyStamped,
    Closed,
    Exhausted,
    InvalidReward,
    NotStamped,
    StampOutOfRange,
    Starved,
    VersionWentBack,
)
from samplebuffer.group import OpenGroup
from samplebuffer.limits import Limits, check_callable
from samplebuffer.shelf import Shelf
from samplebuffer.tasks import Task, Tasks
from samplebuffer.ticket import Ticket, as_number, as_text
from samplebuffer.values import Answer, Batch, Fate, GivenUp, Group, Reason, Sample
from samplebuffer.wanting import Wanting

log = logging.getLogger("samplebuffer")

GroupEnd = Literal["delivered", "filtered", "given_up", "recycled"]

REMEMBERED = 100  # given-up groups kept for reports; their number is counted without end


class Core:
    """Owns the groups. `changed` is called after each operation, once the state is consistent."""

    def __init__(
        self,
        tasks: Tasks,
        limits: Limits,
        *,
        keep: Callable[[Group], bool] | None = None,
        length: Callable[[Any], int | None] | None = None,
        version: int = 0,
        book: Book | None = None,
    ) -> None:
        check_callable("keep", keep)
        check_callable("length", length)
        self.tasks = tasks
        self.limits = limits
        self.version = version
        self.book = book or Book()
        self.groups: dict[int, OpenGroup] = {}
        self.opened = 0
        self.group_ends: dict[GroupEnd, int] = {"delivered": 0, "filtered": 0, "given_up": 0, "recycled": 0}
        self.given_up: deque[GivenUp] = deque(maxlen=REMEMBERED)
        self.wanting = Wanting(limits.launch)
        self.shelf = Shelf()
        self.lent: dict[int, OpenGroup] = {}  # delivered groups that occupy room until they are confirmed
        self.callback_errors = 0
        self.closed = False
        self.resting = False
        self.changed: Callable[[], None] = lambda: None
        self._keep = keep
        self._length = length
        self._capacity = limits.capacity

    # Tickets out.

    def take_ticket(self) -> Ticket | None:
        """The next member to run, the oldest group first; None when there is no room now."""
        if self.closed:
            raise Closed("the buffer is closed")
        group = None if self.resting else self.wanting.first(self.groups) or self._open()
        if group is None:
            if self.alive == 0 and self.tasks.over:
                raise Exhausted("the tasks have ended and every group has left") from self.tasks.error
            return None
        ticket = Ticket(self, self.book.issued, group.key, group.id, group.issued, self.version)
        group.issued += 1
        group.running[ticket.id] = ticket
        self.book.issue(ticket)
        return ticket

    def _open(self) -> OpenGroup | None:
        task = self.tasks.take() if self.alive < self._capacity else None
        if task is None:
            return None
        group = OpenGroup(self.opened, task)
        self.opened += 1
        self.groups[group.id] = group
        self.wanting.put(group)
        return group

    # Answers in.

    def stamp(self, ticket: Ticket, version: int) -> None:
        """Record the start version of a running member."""
        if ticket.state != "running":
            return
        if ticket.start_version is not None:
            raise AlreadyStamped(ticket.id, ticket.state, f"stamped with {ticket.start_version} already")
        version = index(version)
        if not ticket.issued_version <= version <= self.version:
            raise StampOutOfRange(
                ticket.id,
                ticket.state,
                f"stamp({version!r}) is outside {ticket.issued_version} (served at issue) to {self.version} (served "
                "now); call advance before generation resumes, and stamp the version of the first token",
            )
        self.book.stamp(ticket, version)
        ticket.start_version = version

    def finish(self, ticket: Ticket, payload: Any, reward: float) -> Answer:
        """Take a finished member, and complete its group with the last one."""
        if ticket.state != "running":
            return self._late(ticket, payload)
        start = ticket.start_version
        if start is None:
            raise NotStamped(ticket.id, ticket.state, "finish before stamp; stamp the version of the first token")
        number = as_number(reward)
        if not isfinite(number):
            raise InvalidReward(ticket.id, ticket.state, f"reward {reward!r} is not finite; use fail instead")
        length = self._measure(payload)
        sample = Sample(ticket.id, ticket.member, start, number, payload, length)
        group = self.groups[ticket.group_id]
        whole, kept = None, True
        if len(group.done) + 1 == self.limits.group_size:
            whole = Group(group.key, group.id, [*group.done, sample])
            kept = self._keep is None or bool(self._keep(whole))  # may raise: nothing has changed yet

        ticket.state = "finished"
        del group.running[ticket.id]
        self.book.finish(ticket, sample)
        group.done.append(sample)
        if whole is not None:
            ended = self._end_running(group, "surplus", "surplus")
            if kept:
                self._complete(group, whole)
            else:
                self._leave(group, "filtered", "filtered")
            self.settle(ended, "surplus")
        return "accepted"

    def _late(self, ticket: Ticket, payload: Any) -> Answer:
        fate = ticket.state
        if fate != "surplus" and fate != "stale":
            return "ended"
        if payload is not None and not ticket.late and (length := self._measure(payload)) is not None:
            ticket.late = True
            self.book.lengths.add(fate, length)
        return fate

    def _measure(self, payload: Any) -> int | None:
        length = self._length(payload) if self._length else None
        return None if length is None else index(length)  # now: counting must not fail when the member ends

    def lose(self, ticket: Ticket, fate: Fate, error: BaseException | str) -> bool:
        """Take back a running member at its producer's wish; give the group up when its budget is passed."""
        if ticket.state != "running":
            return False
        group = self.groups[ticket.group_id]
        self._return(group, ticket, fate)
        self.settle(self.replace(group, 1, error), "failed")
        return True

    def withdraw(self, ticket: Ticket) -> None:
        """Take back a ticket that nobody saw: its waiter was cancelled. Nobody failed, so the budget stays."""
        if ticket.state == "running":
            group = self.groups[ticket.group_id]
            self._return(group, ticket, "cancelled")
            self.wanting.put(group)
            self.settle()

    def _return(self, group: OpenGroup, ticket: Ticket, fate: Fate) -> None:
        ticket.state = "returned"
        del group.running[ticket.id]
        self.book.end_running(ticket, fate)

    def replace(self, group: OpenGroup, lost: int, error: BaseException | str) -> list[Ticket]:
        """Have lost members replaced, within the budget; else give the group up."""
        group.lost += lost
        if group.lost <= self.limits.max_replacements:
            self.wanting.put(group)
            return []
        text = as_text(error)
        self.given_up.append(GivenUp(group.key, group.id, group.lost, text))
        log.warning(
            "group %d (key %r) is given up after losing %d members: %s", group.id, group.key, group.lost, text
        )
        ended = self._end_running(group, "failed", "failed")
        self._leave(group, "given_up", "failed")
        return ended

    def adopt(self, group: OpenGroup, samples: list[Sample]) -> None:
        """Take in a group of a saved state; it was judged when it was completed."""
        self.groups[group.id] = group
        group.done = samples
        for sample in samples:
            self.book.restore(sample, group.id)
        if len(samples) == self.limits.group_size:
            self._complete(group, Group(group.key, group.id, list(samples)))
        else:
            self.wanting.put(group)

    def _complete(self, group: OpenGroup, whole: Group) -> None:
        group.whole = whole
        self.shelf.put(whole.oldest, group.id)

    # Time passes.

    def advance(self, version: int) -> list[Ticket]:
        """Serve a version: end every member past the bound. Returns the running tickets that ended."""
        version = index(version)
        if version < self.version:
            raise VersionWentBack(version, self.version)
        self.version = version
        self.resting = False
        cut = self.limits.oldest(version)
        ended: list[Ticket] = []
        for group_id in sorted(self.book.groups_below(cut), reverse=True):  # the oldest is put back last: in front
            ended += self.age(self.groups[group_id], cut)
        self.shelf.discard_below(cut)  # these groups lost their oldest members just now
        self.settle(ended, "stale")
        return ended

    def age(self, group: OpenGroup, cut: int) -> list[Ticket]:
        """End the stale members of a group that has some; the caller takes it off the shelf."""
        tickets, samples = group.stale(cut)
        if 2 * (group.alive - len(tickets) - len(samples)) < group.alive:
            return self._recycle(group, "stale", "stale")
        for ticket in tickets:
            self._end_ticket(group, ticket, "stale", "stale")
        for sample in samples:
            self.book.end_buffered(sample, "stale")
        group.done = [sample for sample in group.done if sample.start_version >= cut]
        group.whole = None  # a complete group has no running member, so it lost a finished one
        self.wanting.put(group)
        return tickets

    def cancel_spares(self) -> list[Ticket]:
        """End every member alive as surplus, recycle the groups, and issue nothing until `advance`."""
        ended = self._rest()
        self.settle(ended, "surplus")
        return ended

    def _rest(self) -> list[Ticket]:
        ended: list[Ticket] = []
        for group in sorted(self.groups.values(), key=lambda group: -group.id):
            ended += self._recycle(group, "surplus", "surplus")
        self.shelf.clear()
        self.resting = True
        return ended

    def wake(self) -> None:
        """Issue tickets again, though no version advanced."""
        self.resting = False
        self.settle()

    def close(self) -> None:
        """End every running member; finished ones stay for `state_dict`."""
        if self.closed:
            return
        self.closed = True
        ended: list[Ticket] = []
        for group in self.groups.values():
            ended += self._end_running(group, "closed", "cancelled")
        self.settle(ended, "closed")

    def _recycle(self, group: OpenGroup, reason: Reason, fate: Fate) -> list[Ticket]:
        ended = self._end_running(group, reason, fate)
        self._leave(group, "recycled", fate)
        self.tasks.put_back(Task(group.key, group.lost))
        return ended

    # Batches out.

    def take_batch(
        self,
        *,
        partial: bool = False,
        trainer_version: int | None = None,
        cancel_spares: bool = False,
        rest: bool = False,
        lend: bool = False,
    ) -> Batch | None:
        """A batch of the oldest complete groups; None when it can not be filled yet. See `loans` for `lend`."""
        if self.closed:
            raise Closed("the buffer is closed")
        trainer_version = self.version if trainer_version is None else index(trainer_version)
        size = self._batch_size(partial)
        if size == 0:
            return None
        groups = [self.groups[self.shelf.pop()] for _ in range(size)]
        for group in groups:
            self._leave(group, "delivered", "delivered")
            if lend:
                self.lent[group.id] = group
        self.resting = self.resting or rest
        ended = self._rest() if cancel_spares else []
        batch = Batch(
            groups=[group.whole for group in groups if group.whole is not None],
            version=self.version,
            trainer_version=trainer_version,
            ledger=self.book.ledger,
        )
        self.book.count_delivered(batch)
        self.settle(ended, "surplus")
        return batch

    def _batch_size(self, partial: bool) -> int:
        size, ready = self.limits.batch_groups, len(self.shelf)
        if ready >= size:
            return size
        if self.alive >= size or not self.tasks.over:
            return 0
        if partial and self.alive:
            return ready if ready == self.alive else 0
        raise Starved(
            f"the tasks have ended after {self.tasks.drawn} keys; {self.alive} groups are left, a batch needs {size}",
            self.book.ledger,
        ) from self.tasks.error

    @property
    def alive(self) -> int:
        """Groups that occupy room."""
        return len(self.groups) + len(self.lent)

    @property
    def news(self) -> bool:
        """Whether `take_batch` could answer with other than None."""
        size = self.limits.batch_groups
        return len(self.shelf) >= size or self.closed or (self.alive < size and self.tasks.over)

    @property
    def ready(self) -> bool:
        """Whether a whole batch is complete."""
        return len(self.shelf) >= self.limits.batch_groups and not self.closed

    @property
    def at_stake(self) -> int:
        """Groups that the next batch could still hold, and that the next version would end incomplete."""
        old = self.book.groups_below(self.limits.oldest(self.version + 1))
        complete = sum(self.groups[group_id].whole is not None for group_id in old)
        return max(0, min(len(old), self.limits.batch_groups) - complete)

    @property
    def moves(self) -> tuple[int, ...]:
        """Differs from before when what is `at_stake` may."""
        return self.version, self.shelf.changes, sum(self.book.ended.values())

    # How members and groups end.

    def _end_ticket(self, group: OpenGroup, ticket: Ticket, reason: Reason, fate: Fate) -> None:
        ticket.state = reason
        del group.running[ticket.id]
        self.book.end_running(ticket, fate)

    def _end_running(self, group: OpenGroup, reason: Reason, fate: Fate) -> list[Ticket]:
        ended = list(group.running.values())
        for ticket in ended:
            self._end_ticket(group, ticket, reason, fate)
        return ended

    def _leave(self, group: OpenGroup, how: GroupEnd, fate: Fate) -> None:
        for sample in group.done:
            self.book.end_buffered(sample, fate)
        del self.groups[group.id]
        self.group_ends[how] += 1

    def settle(self, ended: Sequence[Ticket] = (), reason: Reason = "surplus") -> None:
        """Tell everyone, now that the state is consistent. A callback may call the buffer again."""
        self.changed()
        for ticket in ended:
            for callback in ticket.take_callbacks():
                try:
                    callback(reason)
                except (Exception, CancelledError):  # it belongs to another producer than the caller
                    self.callback_errors += 1
                    log.exception("the cancel callback of %r raised", ticket)
