"""What a configuration says about devices and links becomes the times of the simulated parts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollart.simulate.build import World, make_world, trainer_rates
from rollart.simulate.catalog import GIB, builtin
from rollart.simulate.clock import VirtualLoop
from rollart.simulate.config import Simulation, make_simulation

CONSTANTS = builtin().calibration
WEIGHTS = builtin().shape("qwen3-8b").parameters * 2


def simulation(**world: Any) -> Simulation:
    given: dict[str, Any] = {
        "model": "qwen3-8b",
        "generation": [{"hardware": "H800", "gpus": 8}, {"hardware": "H20", "gpus": 8}],
        "training": {"hardware": "H800", "gpus": 8},
        "tasks": {"Shop": "webshop"},
    }
    return make_simulation({"tasks": {"Shop": {"kind": "env", "env": "sim:shop"}}, "simulate": given | world})


def test_a_kind_of_ones_own_answers_in_as_many_tokens_as_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = """
from rollart.tasks import TaskConfig

class Own:
    class Config(TaskConfig, frozen=True):
        max_tokens: int = 7
"""
    (tmp_path / "simulated_kind.py").write_text(words)
    monkeypatch.syspath_prepend(str(tmp_path))
    given = make_simulation(
        {"tasks": {"Own": {"kind": "simulated_kind:Own"}}, "simulate": {"tasks": {"Own": "tiny-lake"}}}
    )
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        (task,) = runner.run(built(given)).setting.tasks.tasks.values()
    assert task.settings.max_tokens == 7


async def built(given: Simulation) -> World:
    return make_world(given)


def test_a_broadcast_leaves_the_trainers_cluster_over_the_slower_network() -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        world = runner.run(built(simulation(transport="broadcast")))
    times = {engine.hardware: engine.update_time for engine in world.engines}
    assert times["H800"] == pytest.approx(CONSTANTS.broadcast_start_s + WEIGHTS / (CONSTANTS.broadcast_gibs * GIB))
    assert times["H20"] == pytest.approx(WEIGHTS / (CONSTANTS.pull_gibs * GIB))
    assert times["H20"] > times["H800"]


def test_ranks_that_push_together_take_a_part_of_the_time() -> None:
    async def push_s(streams: int) -> float:
        training = {"hardware": "H800", "gpus": 8, "push_streams": streams}
        return (await make_world(simulation(training=training)).trainer.publish(1)).seconds

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        alone, together = runner.run(push_s(1)), runner.run(push_s(4))
    assert alone == pytest.approx(WEIGHTS / (CONSTANTS.push_gibs * GIB)) and together == pytest.approx(alone / 4)


def test_nodes_that_pull_together_share_what_the_store_gives() -> None:
    async def pull_s(**store: float) -> float:
        world = make_world(simulation(store=store))
        start = asyncio.get_running_loop().time()
        await asyncio.gather(*(node.pull(1) for node in world.nodes))
        return asyncio.get_running_loop().time() - start

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        alone, narrow, far = (runner.run(pull_s(**store)) for store in ({}, {"gibs": 2.08}, {"latency_s": 3.0}))
    assert alone == pytest.approx(WEIGHTS / (CONSTANTS.pull_gibs * GIB))
    assert narrow == pytest.approx(2 * alone) and far == pytest.approx(alone + 3.0)


def test_a_step_takes_time_whatever_its_batch() -> None:
    assert trainer_rates(simulation()).step_s == CONSTANTS.training_s > 0
    assert trainer_rates(simulation(training={"hardware": "H800", "gpus": 8, "step_s": 2.5})).step_s == 2.5
    assert trainer_rates(make_simulation({})).step_s == 0  # a tiny model on a processor
