"""A part of a fleet with the same part of its work takes about the same time."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from rollart.planner.judge import judge
from rollart.planner.search import given_candidate
from rollart.planner.shrink import divisor, shrunk
from rollart.simulate.config import load_simulation, make_simulation, read_tree

pytestmark = pytest.mark.seconds

EXAMPLES = Path(__file__).parents[2] / "examples"


def changed(**buffer: Any) -> dict[str, Any]:
    tree = read_tree(EXAMPLES / "simulate_production.yaml", [])
    return {**tree, "buffer": {**tree["buffer"], **buffer}}


def test_only_large_fleets_are_shrunk() -> None:
    given = make_simulation(changed())
    assert [divisor(given, gpus) for gpus in (3008, 1504, 512, 376)] == [8, 4, 2, 1]
    assert divisor(make_simulation(changed(batch_groups=64)), 3008) == 2
    assert divisor(make_simulation(changed(batch_groups=257)), 3008) == 1
    assert divisor(load_simulation(EXAMPLES / "simulate_paper.yaml"), 128) == 1


def test_faults_count_nodes_so_the_fleet_stays_whole() -> None:
    tree = changed()
    tree["simulate"]["faults"] = [{"kind": "node", "at": 10, "for_s": 10, "count": 4}]
    assert divisor(make_simulation(tree), 3008) == 1


def test_engines_stay_whole_and_as_many_ranks_push() -> None:
    tree = changed(spare_groups=16)
    tree["simulate"]["store"] = {"gibs": 400}
    part = make_simulation(shrunk(tree, 8))
    assert part.world.store.gibs == 50
    assert (part.config.buffer.batch_groups, part.config.buffer.spare_groups) == (32, 2)
    assert part.config.rollout.concurrency == 64
    assert part.gpus == {"H800": 312 + 63} and part.training.push_streams == 63


def test_a_part_takes_the_time_of_the_whole() -> None:
    logging.getLogger().setLevel(logging.CRITICAL)
    tree = read_tree(EXAMPLES / "simulate_small.yaml", [])
    del tree["tasks"]["WebShop"], tree["simulate"]["tasks"]["WebShop"]  # what is left has fewer turns, and less noise
    tree["simulate"]["generation"] = [{"hardware": "H800", "gpus": 32}]
    tree["simulate"]["training"] = {"hardware": "H800", "gpus": 16}
    tree["buffer"] |= {"batch_groups": 64}
    tree["rollout"] = {"concurrency": 512}
    given = given_candidate(make_simulation(tree))
    whole, part = judge(tree, given, 8), judge(tree, given, 8, by=2)
    assert part.summary.step_s == pytest.approx(whole.summary.step_s, rel=0.1)
    assert part.by * part.summary.tokens_per_s == pytest.approx(whole.summary.tokens_per_s, rel=0.1)
    assert part.summary.cost == pytest.approx(whole.summary.cost, rel=0.1)
