"""The waiting around the core: who waits for a ticket or a batch, and what wakes them.

- `next_ticket` waits for room or a member to replace, in order of arrival. The operation that makes room gives the
  ticket to the first waiter before it returns. A waiter cancelled after that gives the ticket back and re-raises.
- `get_batch` waits until enough groups are complete, or never can be. It is woken without being given anything and
  looks again, so a waiter cancelled at any point takes nothing with it. With `patience` it lets groups at the bound
  complete first.
- `close` wakes all of them with `Closed`.

There is no `await` between a check and the act that it allows (tests/samplebuffer/test_samplebuffer_waiting.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from fractions import Fraction
from math import inf
from typing import Any

from samplebuffer import state
from samplebuffer.book import staleness, staleness_of
from samplebuffer.core import Core
from samplebuffer.errors import Closed
from samplebuffer.limits import check_patience, check_timeout, check_version, make_limits
from samplebuffer.patience import Patience
from samplebuffer.stats import Groups, OffPolicy, Stats, Waits
from samplebuffer.tasks import Tasks
from samplebuffer.ticket import Ticket
from samplebuffer.values import Batch, Group, Ledger

DEFAULT_CODEC = state.MsgpackCodec()
# Before the caller's deadline, so that a batch that is there is handed out rather than timed out.
_MOMENT = 1e-3


class SampleBuffer:
    """A buffer of trajectories, in whole groups, none of them older than `ceil(alpha)` versions at hand-out."""

    def __init__(
        self,
        tasks: Iterable[Any],
        *,
        batch_groups: int,
        group_size: int,
        alpha: float | Fraction = 1,
        spare_groups: int = 0,
        spare_members: int = 0,
        max_replacements: int | None = None,
        evict: bool = True,
        keep: Callable[[Group], bool] | None = None,
        length: Callable[[Any], int | None] | None = None,
        version: int = 0,
        patience: float = 0.0,
    ) -> None:
        """`max_replacements` is how many members a group may lose to `fail` and `cancel` before it is given up (by
        default twice the members launched). `keep` judges whole groups. `length` measures payloads, for histograms.
        `evict=False` bounds staleness at admission only, by the capacity: what others do, to be compared with.
        `patience` is how much of what the next version would throw away a batch may spend on waiting for it: 0 hands
        out at once, 1 waits until both cost the same (see `patience.py`).
        """
        check_version(version)
        check_patience(patience)
        limits = make_limits(batch_groups, group_size, alpha, spare_groups, spare_members, max_replacements, evict)
        self._start(Core(Tasks(tasks), limits, keep=keep, length=length, version=version), patience)

    @classmethod
    def restore(
        cls,
        saved: dict[str, Any],
        tasks: Iterable[Any],
        *,
        codec: state.Decodes = DEFAULT_CODEC,
        keep: Callable[[Group], bool] | None = None,
        length: Callable[[Any], int | None] | None = None,
        skip_drawn: bool = True,
        patience: float = 0.0,
    ) -> SampleBuffer:
        """A buffer in a saved state. `tasks` start from the beginning, and those drawn before are skipped; with
        `skip_drawn=False` they start where the saved buffer stopped drawing."""
        check_patience(patience)
        buffer = cls.__new__(cls)
        buffer._start(state.load(saved, tasks, codec, skip_drawn, keep=keep, length=length), patience)
        return buffer

    def _start(self, core: Core, patience: float) -> None:
        core.changed = self._wake
        self.core = core
        self.patience = Patience(patience)
        self._ticket_waiters: dict[asyncio.Future[Ticket | None], None] = {}  # in order of arrival
        self._batch_waiters: set[asyncio.Future[None]] = set()
        self._waiting = 0  # consumers in get_batch
        self._waited = 0.0
        self._first_wait: float | None = None
        self._last_wait = 0.0

    async def next_ticket(self) -> Ticket:
        """The next trajectory to run. Raises Exhausted when none can ever come, Closed after `close`."""
        while (ticket := self.next_ticket_nowait()) is None:
            if (ticket := await self._turn()) is not None:
                break
        return ticket

    async def _turn(self) -> Ticket | None:
        """What the buffer gives when it is this caller's turn; None when it says to ask again."""
        waiter = self.line_up()
        try:
            return await waiter
        except asyncio.CancelledError:
            self.leave_line(waiter)
            raise

    def line_up(self) -> asyncio.Future[Ticket | None]:
        """A place in the line for tickets; its result as from `_turn`. For faces that wait their own way."""
        waiter: asyncio.Future[Ticket | None] = asyncio.get_running_loop().create_future()
        self._ticket_waiters[waiter] = None
        return waiter

    def leave_line(self, waiter: asyncio.Future[Ticket | None]) -> None:
        """Give up a place in the line, or back the ticket that came meanwhile."""
        self._ticket_waiters.pop(waiter, None)
        if not waiter.cancel() and not waiter.cancelled() and (ticket := waiter.result()) is not None:
            self.core.withdraw(ticket)

    def next_ticket_nowait(self) -> Ticket | None:
        """The next trajectory to run; None where `next_ticket` would wait."""
        ticket = self.core.take_ticket()  # while others wait there is none: whatever appears is theirs at once
        self._wake_consumers()  # the tasks may have been found to have ended
        return ticket

    async def get_batch(
        self,
        timeout: float | None = None,
        *,
        partial: bool = False,
        trainer_version: int | None = None,
        cancel_spares: bool = False,
        rest: bool = False,
    ) -> Batch:
        """`batch_groups` whole groups, the oldest first.

        With `partial`, what is left after the tasks' end is handed out as a smaller batch. With `cancel_spares` (mode
        `sync`) all other groups are cancelled in the same instant, their keys put back, and no ticket is issued until
        `advance`. With `rest` no ticket is issued until `advance` or `wake`: what began in the moments before an
        update would be a version older for nothing. Raises Starved, Closed, TimeoutError.
        """
        return await self.wait_for_batch(
            timeout,
            lambda: self.get_batch_nowait(
                partial=partial, trainer_version=trainer_version, cancel_spares=cancel_spares, rest=rest
            ),
        )

    async def wait_for_batch(self, timeout: float | None, take: Callable[[], Batch | None]) -> Batch:
        """What `take` gives, asked again whenever there is news. For faces that take batches their own way."""
        check_timeout(timeout)
        clock = asyncio.get_running_loop().time
        deadline = inf if timeout is None else clock() + timeout
        self._count_wait(+1)
        try:
            async with asyncio.timeout(timeout):
                waited = 0.0  # a batch that is there when it is asked for goes at once: rollout is ahead
                while (batch := take()) is None:
                    await self._news()
                    waited = await self._linger(deadline)
                self.patience.handed_out(clock(), waited)
                return batch
        finally:
            self._count_wait(-1)

    async def _linger(self, deadline: float) -> float:
        """Wait, as long as patience says, for groups that the next version would end. Returns the seconds it took.

        What is at stake is counted again when a member has ended, a group is complete or the version advanced, not at
        other news. The caller's deadline ends the wait a moment early, so that it gets the batch.
        """
        core, clock = self.core, asyncio.get_running_loop().time
        start = clock()
        while core.ready and (at_stake := core.at_stake):
            seen = core.moves
            end = min(start + self.patience.seconds(at_stake, core.limits.batch_groups), deadline - _MOMENT)
            while core.ready and core.moves == seen:
                if not await self._news(end):
                    return clock() - start
        return clock() - start

    def _count_wait(self, by: int) -> None:
        """Add the time since the last change if some consumer waited then; two at once count once."""
        now = asyncio.get_running_loop().time()
        if self._first_wait is None:
            self._first_wait = now
        elif self._waiting:
            self._waited += now - self._last_wait
        self._waiting += by
        self._last_wait = now

    def get_batch_nowait(
        self,
        *,
        partial: bool = False,
        trainer_version: int | None = None,
        cancel_spares: bool = False,
        rest: bool = False,
    ) -> Batch | None:
        """A batch as from `get_batch`; None where that would wait."""
        return self.core.take_batch(
            partial=partial, trainer_version=trainer_version, cancel_spares=cancel_spares, rest=rest
        )

    async def _news(self, end: float | None = None) -> bool:
        """Wait until there is some, or until `end`; whether there is."""
        loop = asyncio.get_running_loop()
        if end is not None and loop.time() >= end:
            return False
        waiter: asyncio.Future[None] = loop.create_future()
        self._batch_waiters.add(waiter)
        try:
            if end is None:
                await waiter
            else:
                await asyncio.wait((waiter,), timeout=end - loop.time())
        finally:
            self._batch_waiters.discard(waiter)
        return waiter.done()

    def _wake(self) -> None:
        while self._ticket_waiters:
            waiter = next(iter(self._ticket_waiters))
            if not waiter.done():  # else it was cancelled, and has yet to learn of it
                try:
                    ticket = self.core.take_ticket()
                except Closed:
                    ticket = None  # each waiter meets the error itself when it asks again
                else:
                    if ticket is None:
                        break
                waiter.set_result(ticket)
            del self._ticket_waiters[waiter]
        self._wake_consumers()

    def _wake_consumers(self) -> None:
        if self._batch_waiters and self.core.news:
            for waiter in self._batch_waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def advance(self, version: int) -> list[Ticket]:
        """Generation now serves `version`. Returns the running tickets that this ended, their callbacks called."""
        return self.core.advance(version)

    def cancel_spares(self) -> list[Ticket]:
        """End every member alive, put the keys back, and issue nothing until `advance`. Returns the running ones."""
        return self.core.cancel_spares()

    def wake(self) -> None:
        """Issue tickets again after a batch that was taken with `rest`, though no version advanced."""
        self.core.wake()

    def close(self) -> None:
        """End for good: running tickets are cancelled, every waiter gets Closed. `state_dict` still works."""
        self.core.close()

    @property
    def ledger(self) -> Ledger:
        """Where every issued ticket is."""
        return self.core.book.ledger

    def state_dict(self, codec: state.Encodes = DEFAULT_CODEC) -> dict[str, Any]:
        """The state as plain values, payloads encoded; for `restore`."""
        return state.save(self.core, codec)

    def stats(self) -> Stats:
        """A snapshot of counts, staleness and waits."""
        core, book = self.core, self.core.book
        elapsed = self._last_wait - self._first_wait if self._first_wait is not None else 0.0
        return Stats(
            version=core.version,
            max_staleness=core.limits.staleness,
            capacity=core.limits.capacity,
            tasks_drawn=core.tasks.drawn,
            tasks_ended=core.tasks.ended,
            ledger=book.ledger,
            groups=Groups(core.alive, len(core.shelf), len(core.tasks.waiting), core.opened, **core.group_ends),
            off_policy=OffPolicy(
                in_flight=staleness(book.running, core.version),
                in_queue=staleness(book.buffered, core.version),
                delivered=staleness_of(book.delivered_staleness.items()),
                trainer_lag=staleness_of(book.delivered_lag.items()),
            ),
            waits=Waits(
                producers=len(self._ticket_waiters),
                consumers=len(self._batch_waiters),
                get_batch_s=self._waited,
                get_batch_share=self._waited / elapsed if elapsed > 0 else 0.0,
                patience_s=self.patience.waited,
            ),
            lengths=book.lengths.histograms(),
            callback_errors=core.callback_errors,
            given_up=list(core.given_up),
        )
