"""What is stuck is named, in words that find it."""

import asyncio
from typing import Any

from tests.envmanager.fakes import FOREVER, BufferClosed, FakeBuffer, FakePolicy, World, virtual

from envmanager import Limits, RolloutScheduler

NO_DEADLINES = Limits(step_timeout=None, reset_timeout=None, turn_timeout=None, episode_timeout=None)


def test_each_stuck_phase_is_named_once(caplog):
    async def scenario() -> None:
        world = World({"hangs": {"step": FOREVER}, "starts": {"reset": FOREVER}}, turns=40)
        buffer = FakeBuffer(["fine", "hangs", "starts"], ends=False)
        options: dict[str, Any] = {"limits": NO_DEADLINES, "stall_after": 10.0, "closed": (BufferClosed,)}
        rollouts = RolloutScheduler(world, FakePolicy(), buffer, **options)
        running = asyncio.create_task(rollouts.run())
        await asyncio.sleep(60.0)
        assert [(one.key, one.phase, one.seconds) for one in rollouts.stuck()] == [
            ("starts", "reset", 60.0),
            ("hangs", "step", 59.0),
        ]
        buffer.close()
        await running

    virtual(scenario())
    said = [record.getMessage() for record in caplog.records if "has been in" in record.getMessage()]
    assert len(said) == 2
    assert "'starts' has been in reset for 10 s" in said[0] and "'hangs' has been in step for 10 s" in said[1]
