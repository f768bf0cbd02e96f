"""The six steps happen in order, and the served version advances only with every worker's word."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from types import SimpleNamespace

import async_solipsism
import pytest

from llmproxy.errors import WorkerLost
from rollart.errors import ParityError, WeightsDiffer
from rollart.observe.trace import Trace, read_trace
from rollart.pipeline.controller import Controller
from rollart.pipeline.iteration import Iteration
from rollart.pipeline.modes import MODES
from rollart.pipeline.ports import Push, Trained
from rollart.pipeline.weights import WeightPath

WORLDS: list[World] = []


def virtual(test):
    """Run an async test on virtual time."""

    @functools.wraps(test)
    def run(**arguments):
        with asyncio.Runner(loop_factory=async_solipsism.EventLoop) as runner:
            try:
                runner.run(test(**arguments))
            finally:
                while WORLDS:
                    runner.run(WORLDS.pop().close())

    return run


class World:
    """Everything a controller drives, on virtual time; `log` is what happened, in order."""

    def __init__(self, tmp_path: Path, mode: str, parity: float | None = 0.0, **controller) -> None:
        self.log: list[str] = []
        self.digest = "{version}"
        self.parity = parity
        self.served = self.version = 0
        self.open = True
        self.lost = 0  # prefetches to fail
        self.resting, self.holds = False, MODES[mode].hold
        self.push_s = 1.0
        trace = Trace(tmp_path / "trace.json", asyncio.get_running_loop().time)
        self.trace = trace
        self.failing: set[str] = set()  # workers whose every prefetch fails
        workers = [SimpleNamespace(id=id, prefetch=functools.partial(self.prefetch, id)) for id in ("gen-0", "gen-1")]
        self.weights = WeightPath(self, workers, trace)
        WORLDS.append(self)
        self.controller = Controller(
            mode=MODES[mode],
            buffer=self,
            gateway=self,
            trainer=self,
            weights=self.weights,
            probe=self,
            evaluate=self.evaluate,
            trace=trace,
            **controller,
        )

    async def close(self) -> None:
        await self.weights.close()
        self.trace.close()

    async def take(self, seconds: float, what: str) -> None:
        await asyncio.sleep(seconds)
        self.log.append(what)

    async def get_batch(self, *, trainer_version: int, cancel_spares: bool, rest: bool) -> str:
        assert trainer_version == self.version
        assert not self.resting
        self.resting = rest or cancel_spares
        await self.take(5, "get_batch, held" if cancel_spares else "get_batch")
        return "batch"

    def advance(self, version: int) -> list[str]:
        self.log.append(f"advance {version}")
        self.served = version
        self.resting = False
        return ["ended"]

    def wake(self) -> None:
        self.log.append("wake")
        self.resting = False

    async def suspend(self) -> None:
        await self.take(0.1, "suspend")
        self.open = False

    async def update(self, version: int):
        assert not self.open, "updated while generation runs"
        await self.take(0.2, f"update {version}")
        return [
            SimpleNamespace(worker=f"gen-{i}", version=version, digest=self.digest.format(version=version), error="")
            for i in range(2)
        ]

    async def resume(self) -> None:
        await self.take(0.1, "resume")
        self.open = True

    async def train_step(self, batch: str, step: int) -> Trained:
        assert self.holds or self.open is not self.resting, "generation runs and nothing may begin"
        await self.take(3, f"train {step}")
        self.version = step
        return Trained(step, {})

    async def publish(self, version: int) -> Push:
        assert version == self.version, "asked for too late"
        await self.take(self.push_s, f"publish {version}")
        return Push(version, self.push_s, 100, str(version))

    async def prefetch(self, id: str, version: int) -> None:
        await asyncio.sleep(0.5)
        if id in self.failing:
            raise TimeoutError("no version within 60 s")
        if self.lost:
            self.lost -= 1
            raise WorkerLost("gen", "killed")

    async def measure(self, version: int) -> float | None:
        self.log.append(f"probe {version}")
        return self.parity

    async def evaluate(self) -> float:
        await self.take(1, f"evaluate {self.served}")
        return 0.5

    async def run(self, iterations: int, **last) -> list[Iteration]:
        return [
            await self.controller.iteration(step, **(last if step == iterations else {}))
            for step in range(1, iterations + 1)
        ]


@virtual
async def test_rollart_trains_beside_rollout_and_commits_an_iteration_later(tmp_path: Path) -> None:
    world = World(tmp_path, "rollart")
    first, second = await world.run(2)
    assert world.log == [
        *("get_batch", "train 1", "publish 1", "get_batch"),
        *("suspend", "update 1", "advance 1", "resume", "probe 1", "train 2"),
    ]
    assert first.switch is None
    assert second.switch is not None
    assert (first.served, second.served, world.controller.served) == (0, 1, 1)
    assert second.switch.exposed_s == pytest.approx(0.4)
    assert second.switch.staged.pull_s == pytest.approx(0.5)
    assert second.switch.ended == 1


@virtual
async def test_the_last_iteration_commits_and_evaluates_its_own_weights(tmp_path: Path) -> None:
    world = World(tmp_path, "rollart")
    (*_, last) = await world.run(2, evaluate=True, last=True)
    assert world.log[-6:] == ["suspend", "update 2", "advance 2", "resume", "probe 2", "evaluate 2"]
    assert (last.served, last.success) == (2, 0.5)
    assert not world.weights.under_way


@virtual
async def test_an_evaluation_runs_beside_training_on_the_served_version(tmp_path: Path) -> None:
    world = World(tmp_path, "rollart")
    (*_, second) = await world.run(2, evaluate=True)
    assert world.log[-2:] == ["evaluate 1", "train 2"]
    assert second.success == 0.5
    assert second.time.parts.get("eval", 0.0) == pytest.approx(0.0)


@pytest.mark.parametrize("mode", ["rollart", "areal", "one_off"])
@virtual
async def test_weights_on_a_slow_link_are_committed_beside_the_train_step(tmp_path: Path, mode: str) -> None:
    world = World(tmp_path, mode)
    world.push_s = 7.0  # pulled after 7.5 s; the batch is there after 5, the train step takes 3
    *_, second, third = await world.run(3)
    late = [what for what in world.log[world.log.index("publish 1") :] if "batch" not in what and what != "wake"]
    assert world.log.count("wake") == (0 if mode == "one_off" else 2)
    assert late == [
        *("publish 1", "suspend", "update 1", "advance 1", "resume", "train 2"),
        *("publish 2", "suspend", "update 2", "advance 2", "resume", "train 3"),
    ]
    for iteration in (second, third):
        assert iteration.switch is not None and iteration.switch.parity is None
        assert iteration.switch.exposed_s == pytest.approx(0.4)
        assert iteration.served == iteration.step - 1
        assert iteration.time.wall == pytest.approx(5 + 1 + 3)
        assert iteration.time.parts.get("update") is None


@virtual
async def test_training_waits_only_for_weights_that_take_longer_than_an_iteration(tmp_path: Path) -> None:
    world = World(tmp_path, "rollart")
    world.push_s = 20.0
    *_, last = await world.run(3)
    assert last.time.wall == pytest.approx(20 + 0.5 + 0.4)
    assert last.time.parts["wait_weights"] == pytest.approx(last.time.wall - 5 - 3)
    assert (last.served, last.trained.version) == (2, 3)


@virtual
async def test_weights_that_are_nearly_there_keep_the_plain_order(tmp_path: Path) -> None:
    world = World(tmp_path, "rollart")
    world.push_s = 5.4
    *_, second = await world.run(2)
    assert second.switch is not None and second.switch.parity == 0.0
    assert world.log[-2:] == ["probe 1", "train 2"]


@virtual
async def test_an_evaluation_is_of_one_version_however_slow_the_link(tmp_path: Path) -> None:
    world = World(tmp_path, "rollart")
    world.push_s = 7.0
    await world.run(2, evaluate=True)
    assert world.log[-3:] == ["probe 1", "evaluate 1", "train 2"]


@virtual
async def test_parity_is_measured_every_tenth_version_however_slow_the_link(tmp_path: Path) -> None:
    world = World(tmp_path, "rollart")
    world.push_s = 7.0
    iterations = await world.run(24)
    assert [what for what in world.log if what.startswith("probe")] == ["probe 10", "probe 20"]
    assert [i.step for i in iterations if i.switch and i.switch.parity is not None] == [11, 21]
    assert [i.served for i in iterations] == list(range(24))


@virtual
async def test_what_a_late_switch_finds_wrong_stops_the_run(tmp_path: Path) -> None:
    world = World(tmp_path, "rollart")
    world.push_s, world.digest = 7.0, "stale"
    with pytest.raises(WeightsDiffer, match="gen-0"):
        await world.run(2)
    assert (world.controller.served, world.open) == (0, False)
    await world.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


@virtual
async def test_a_trainer_that_fails_takes_the_late_switch_with_it(tmp_path: Path) -> None:
    world = World(tmp_path, "rollart")
    world.push_s = 20.0
    await world.run(1)

    async def broken(batch: str, step: int) -> Trained:
        raise RuntimeError("out of memory")

    world.train_step = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="out of memory"):
        await world.controller.iteration(2)
    await world.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("mode", ["sync", "sync_plus"])
@virtual
async def test_sync_stands_still_while_it_trains(tmp_path: Path, mode: str) -> None:
    world = World(tmp_path, mode)
    first, second = await world.run(2)
    assert world.log[:7] == ["get_batch, held", "suspend", "train 1", "publish 1", "update 1", "advance 1", "resume"]
    assert (first.served, second.served) == (1, 2)


@virtual
async def test_one_off_trains_on_the_batch_before_and_holds_rollout_back_until_the_switch(tmp_path: Path) -> None:
    world = World(tmp_path, "one_off")
    await world.run(2)
    assert world.log == [
        *("get_batch, held", "advance 0", "train 1", "publish 1", "get_batch, held"),
        *("suspend", "update 1", "advance 1", "resume", "probe 1", "train 2"),
    ]


@pytest.mark.parametrize("mode", MODES)
@virtual
async def test_parts_sum_to_wall_time(tmp_path: Path, mode: str) -> None:
    world = World(tmp_path, mode)
    start = asyncio.get_running_loop().time()
    iterations = await world.run(4, evaluate=True, last=True)
    assert sum(i.time.wall for i in iterations) == pytest.approx(asyncio.get_running_loop().time() - start)
    for iteration in iterations:
        assert iteration.time.parts.get("other", 0.0) == pytest.approx(0.0)


@pytest.mark.parametrize("mode", MODES)
@virtual
async def test_a_wrong_digest_stops_the_run_before_the_version_is_served(tmp_path: Path, mode: str) -> None:
    world = World(tmp_path, mode)
    world.digest = "stale"
    with pytest.raises(WeightsDiffer, match="gen-0"):
        await world.run(2)
    assert world.controller.served == 0
    assert "advance 1" not in world.log
    assert not world.open


@virtual
async def test_an_engine_that_does_not_use_the_weights_stops_the_run(tmp_path: Path) -> None:
    world = World(tmp_path, "rollart", parity=0.5)
    with pytest.raises(ParityError, match="differ by"):
        await world.run(2)
    lenient = World(tmp_path / "lenient", "rollart", parity=0.5, parity_limit=None)
    await lenient.run(2)


@virtual
async def test_what_stops_the_weight_path_reaches_the_controller(tmp_path: Path) -> None:
    world = World(tmp_path, "rollart")

    async def unreachable(version: int) -> Push:
        raise ConnectionError("store gone")

    world.publish = unreachable  # type: ignore[method-assign]
    with pytest.raises(ConnectionError, match="store gone"):
        await world.run(2)


@virtual
async def test_a_worker_that_failed_the_update_does_not_stop_the_others(tmp_path: Path) -> None:
    world = World(tmp_path, "rollart")
    update = world.update

    async def half(version: int):
        acks = await update(version)
        acks[0].digest, acks[0].error = "", "WorkerLost: killed"
        return acks

    world.update = half  # type: ignore[method-assign]
    (*_, second) = await world.run(2)
    assert second.served == 1


@virtual
async def test_a_lost_worker_pulls_later_and_when_all_are_lost_the_first_to_come_back_is_waited_for(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, "rollart")
    world.lost = 1
    (*_, second) = await world.run(2)
    assert second.served == 1
    gone = World(tmp_path / "gone", "rollart")
    gone.lost = 2 * 10
    start = asyncio.get_running_loop().time()
    (*_, second) = await gone.run(2)
    assert second.served == 1
    assert asyncio.get_running_loop().time() - start > 10
    never = World(tmp_path / "never", "rollart")
    never.lost = 10**9
    with pytest.raises(WorkerLost):
        await never.run(2)


@virtual
async def test_weights_that_some_workers_cannot_stage_stop_the_run_only_when_none_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path, "rollart")
    world.failing = {"gen-1"}
    (*_, second) = await world.run(2)
    assert second.served == 1
    assert "not staged on gen-1: no version within 60 s" in caplog.text
    none = World(tmp_path / "none", "rollart")
    none.failing = {"gen-0", "gen-1"}
    with pytest.raises(TimeoutError, match="no version"):
        await none.run(2)


@virtual
async def test_a_version_that_no_engine_is_left_to_prove_is_served_without_parity(tmp_path: Path) -> None:
    world = World(tmp_path, "rollart")
    world.parity = None
    (*_, second) = await world.run(2)
    assert second.served == 1 and second.switch is not None and second.switch.parity is None


@virtual
async def test_a_cancelled_iteration_leaves_no_task(tmp_path: Path) -> None:
    world = World(tmp_path, "rollart")
    task = asyncio.create_task(world.controller.iteration(1, evaluate=True))
    await asyncio.sleep(5.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await world.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


@virtual
async def test_the_trace_shows_the_steps_in_order(tmp_path: Path) -> None:
    world = World(tmp_path, "rollart")
    for iteration in await world.run(2, last=True):
        world.trace.flush(iteration.step, iteration.time.start, iteration.time.end)
    spans = sorted((e.ts or 0, e.name) for e in read_trace(tmp_path / "trace.json") if e.ph == "X")
    names = [name for _, name in spans if name in ("get_batch", "suspend", "update", "resume", "train")]
    expected = [
        "get_batch",
        "train",
        "get_batch",
        "suspend",
        "update",
        "resume",
        "train",
        "suspend",
        "update",
        "resume",
    ]
    assert names == [*expected]
