"""The section `simulate`, and what it takes from the rest of a configuration."""

from __future__ import annotations

from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollart.config import load_config, parse_config
from rollart.errors import ConfigError
from rollart.simulate.config import load_simulation, make_simulation

ROOT = Path(__file__).resolve().parents[2]
TASKS = {"Shop": {"kind": "env", "env": "sim:shop"}}
WORLD = {"model": "qwen3-8b", "generation": [{"hardware": "H800", "gpus": 16, "tensor_parallel": 2}],
         "training": {"hardware": "H20", "gpus": 8}, "tasks": {"Shop": "webshop"}}  # fmt: skip


PROFILE: dict[str, Any] = {name: {"mean": 3} for name in ("turns", "prompt", "observation", "response")}


def test_engines_stand_in_for_the_configured_ones() -> None:
    simulation = make_simulation({"tasks": TASKS, "simulate": WORLD})
    assert simulation.config.generation.workers == 8
    assert simulation.config.generation.affinity == {"default": "H800"}
    assert simulation.gpus == {"H800": 16, "H20": 8}
    assert simulation.cost == pytest.approx(16 * 2.85 + 8)


def test_any_task_may_go_anywhere_where_classes_are_mixed() -> None:
    world = WORLD | {"generation": [{"hardware": "H800", "gpus": 8}, {"hardware": "H20", "gpus": 8}]}
    assert make_simulation({"tasks": TASKS, "simulate": world}).config.generation.affinity == {"default": ""}


def test_a_training_configuration_needs_no_section_of_its_own() -> None:
    simulation = load_simulation(ROOT / "examples" / "frozenlake.yaml")
    assert simulation.fleets[0].hardware == "cpu"
    assert simulation.shape.parameters < 1e6


def test_one_file_serves_training_and_simulation(tmp_path: Path) -> None:
    path = tmp_path / "both.yaml"
    path.write_text(yaml.safe_dump({"tasks": TASKS, "simulate": WORLD}))
    assert load_config(path) == parse_config({"tasks": TASKS})
    assert load_simulation(path).gpus == {"H800": 16, "H20": 8}


def test_nobody_stops_at_a_success_that_nobody_learns() -> None:
    run = {"stop_at_success": 0.1}
    assert make_simulation({"run": run, "tasks": TASKS, "simulate": WORLD}).config.run.stop_at_success is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"buffer": {"alpha": "x"}}, "buffer.alpha = 'x'"),
        ({"buffer": {"batch_groups": None}}, "buffer.batch_groups = None"),
        ({"buffer": [2]}, r"buffer = \[2\]: is a section"),
        ({"generation": ["H800"]}, r"generation = \['H800'\]: is a section"),
        ({"rollout": 5}, "rollout = 5: is a section"),
        ({"simulate": "H800"}, "simulate = 'H800'"),
    ],
)
def test_sections_that_are_none_are_told(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_simulation({"tasks": TASKS, "simulate": WORLD} | change)


def test_engines_run_as_many_sequences_as_the_file_says() -> None:
    def batch(generation: dict[str, int], **world: float) -> float:
        return make_simulation({"tasks": TASKS, "generation": generation, "simulate": WORLD | world}).world.batch

    assert batch({}) == 256 and batch({"max_num_seqs": 32}) == 32 and batch({"max_num_seqs": 32}, batch=8) == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "qwen9"}, "qwen9.*give one of qwen3-8b"),
        ({"tasks": {"Shop": "shops"}}, "shops.*webshop"),
        ({"tasks": {"Shop": "webshop", "Shap": "webshop"}}, "no such task; there are Shop"),
        ({"modell": "x"}, "unknown field"),
        ({"transport": "x"}, "simulate.transport = 'x': must be one of store, broadcast"),
        (
            {"faults": [{"kind": "nod", "at": 5}]},
            r"faults.0.kind = 'nod': must be one of .*did you mean node",
        ),
        (
            {"faults": [{"kind": "link", "at": 5, "count": 9}, {"kind": "node", "at": 5, "count": 3}]},
            r"simulate.faults.1.count = 3: generation stands on 2 nodes; give at most so many",
        ),
        ({"generation": [{"hardware": "H800", "gpus": 3, "tensor_parallel": 2}]}, "not a multiple"),
        ({"generation": [{"hardware": "H800", "gpus": 8, "role": "prefill"}]}, "need each other"),
        ({"calibration": {"speed": 1.0}}, "is not a constant; there are compute"),
        ({"calibration": {"training": nan}}, "simulate.calibration.training = nan: expected float > 0"),
        ({"calibration": {"push_gibs": 0}}, "simulate.calibration.push_gibs = 0"),
        ({"batch": 0.5}, "simulate.batch = 0.5"),
        ({"stall_s": 1e12}, "simulate.stall_s = 1000000000000.0"),
        ({"host": {"cores": 0}}, "simulate.host.cores = 0: expected int >= 1"),
        ({"host": {"cores": 2, "turn_s": -1}}, "simulate.host.turn_s = -1"),
        ({"host": {"cores": 2, "turn_s": inf}}, "simulate.host.turn_s = inf"),
        ({"hardware": {"New": {"tflops": 1}}}, "simulate.hardware.New = .*missing required field memory_gb"),
        ({"tasks": {"Shop": PROFILE | {"success": 2}}}, "simulate.tasks.Shop.success = 2"),
        ({"tasks": {"Shop": PROFILE | {"prompt": {"mean": nan}}}}, "simulate.tasks.Shop.prompt.mean = nan"),
        ({"tasks": {"Shop": PROFILE | {"turns": {"low": 9, "high": 3}}}}, "Shop.turns.*low 9 is above high 3"),
        (
            {"tasks": {"Shop": PROFILE | {"turns": {"shape": "uniform"}}}},
            "Shop.turns.*uniform quantity needs high",
        ),
        ({"tasks": {"Shop": PROFILE | {"turns": {"low": 9, "high": 30}}}}, "Shop.turns.*low without a mean"),
        ({"tasks": {"Shop": {"turns": {"mean": 3}}}}, "prompt is missing; give it, or trace"),
        ({"tasks": {"Shop": {"trace": "nowhere"}}}, "trace = 'nowhere': cannot be read"),
        ({"training": {"hardware": "H800", "gpus": 16, "shared": True}}, "in mode rollart engines generate while"),
        ({"training": {"hardware": "H800", "gpus": 17, "shared": True}}, "17 H800': are generation's own"),
        ({"training": {"hardware": "H20", "gpus": 8, "shared": True}}, "8 H20': are generation's own"),
        ({"store": {"gibs": 0}}, "simulate.store.gibs = 0"),
        ({"rewards": {"kind": "dedicated", "hardware": "H900"}}, "simulate.rewards.hardware = 'H900'"),
        ({"training": {"hardware": "H800", "gpus": 0}}, "training.gpus"),
        ({"training": {"hardware": "H900", "gpus": 8}}, "simulate.training.hardware = 'H900'"),
        ({"generation": [{"hardware": "H900", "gpus": 8}]}, "simulate.generation.0.hardware = 'H900'"),
    ],
)
def test_what_cannot_be_is_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_simulation({"tasks": TASKS, "simulate": WORLD | change})
