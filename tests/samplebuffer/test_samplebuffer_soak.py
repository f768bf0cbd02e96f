"""Long runs on virtual time: heavy-tailed durations, failures, late answers, updates that cross generations."""

from __future__ import annotations

import asyncio
import random

import pytest

from samplebuffer import Closed, Group, SampleBuffer, Starved, Ticket

GROUP = 8


class World:
    """A model that serves a version, rollouts that fail 5 % of the time, a trainer that needs time."""

    def __init__(self, keys: int) -> None:
        self.random = random.Random(keys)
        self.version = 0
        self.filtered = 0
        self.answers = {"accepted": 0, "surplus": 0, "stale": 0, "ended": 0}
        self.buf = SampleBuffer(
            range(keys), batch_groups=32, group_size=GROUP, alpha=1, spare_groups=4, spare_members=1, keep=self.judge
        )

    def judge(self, group: Group) -> bool:
        kept = len({sample.reward for sample in group.samples}) > 1
        self.filtered += not kept
        return kept

    async def produce(self) -> None:
        try:
            while True:
                await self.episode(await self.buf.next_ticket())
        except Closed:
            return

    async def episode(self, ticket: Ticket) -> None:
        """The first answer after a short time, the end after a heavy-tailed one, or when cancelled."""
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(min(self.random.paretovariate(1.3), 500.0), over.set_result, None)
        first = loop.call_later(0.5, lambda: ticket.stamp(self.version))
        ticket.on_cancel(lambda reason: None if over.done() else over.set_result(None))
        await over
        timer.cancel()
        first.cancel()
        if self.random.random() < 0.05:
            ticket.fail("simulated")
        else:
            self.answers[ticket.finish(None, float(self.random.random() < 0.3))] += 1

    async def train(self) -> tuple[set[int], list[int]]:
        seen: set[int] = set()
        keys: list[int] = []
        try:
            while True:
                batch = await self.buf.get_batch(partial=True, trainer_version=self.version + 1)
                assert batch.ledger.balanced and batch.max_staleness <= 1 and batch.max_lag <= 2
                ids = {sample.ticket_id for sample in batch.samples}
                assert len(ids) == GROUP * len(batch.groups) and not ids & seen
                seen |= ids
                keys += [group.key for group in batch.groups]
                self.version += 1
                self.buf.advance(self.version)
                await asyncio.sleep(2.0)
        except Starved:
            return seen, keys


@pytest.mark.parametrize(
    "trajectories",
    [50_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])],
)
@pytest.mark.seconds
async def test_a_long_run_balances_its_ledger(trajectories: int) -> None:
    world = World(keys=trajectories // GROUP)
    producers = [asyncio.create_task(world.produce()) for _ in range(256)]
    seen, keys = await world.train()
    await asyncio.gather(*producers)  # the last hand-out told them that no ticket can ever come

    ledger, groups, off_policy = world.buf.ledger, world.buf.stats().groups, world.buf.stats().off_policy
    assert ledger.balanced and ledger.running == ledger.buffered == 0
    assert ledger.issued >= trajectories
    assert ledger.delivered == len(seen) == GROUP * len(keys) and len(keys) == len(set(keys))
    assert ledger.filtered == GROUP * world.filtered == GROUP * groups.filtered
    assert (
        groups.delivered + groups.filtered + groups.given_up == world.buf.stats().tasks_drawn == trajectories // GROUP
    )
    assert 0.03 < ledger.failed / ledger.issued < 0.08
    assert ledger.stale > 0 and ledger.surplus > 0 and off_policy.delivered.max == 1
    assert world.answers["accepted"] >= ledger.delivered + ledger.filtered
