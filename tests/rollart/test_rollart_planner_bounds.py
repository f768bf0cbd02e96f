"""The closed forms agree with each other, and the simulator obeys them where their premises hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.planner.bounds import (
    Load,
    async_generation,
    async_step,
    best_share,
    best_step,
    most_at_full_width,
    most_at_large_alpha,
    sync_generation,
    sync_step,
)
from rollart.runtime.folder import RunFolder
from rollart.simulate.config import make_simulation
from rollart.simulate.run import Simulated, simulate

positive = st.floats(0.01, 1000)
loads = st.builds(
    Load, workers=st.integers(1, 500), samples=st.integers(1, 5000), mean=positive, longest=positive, train=positive,
    passes=st.integers(1, 4),
)  # fmt: skip
alphas = st.floats(0, 10)


@given(loads, alphas)
def test_at_the_best_share_both_sides_take_equally_long(load: Load, alpha: float) -> None:
    share = best_share(load, alpha)
    assert async_step(load, alpha, share) == pytest.approx(best_step(load, alpha))
    for other in (share * 0.9, share + (1 - share) * 0.1):
        assert async_step(load, alpha, other) >= best_step(load, alpha) * (1 - 1e-9)


@given(loads, alphas)
def test_alpha_never_costs_and_gains_no_more_than_its_limit(load: Load, alpha: float) -> None:
    assert async_generation(load, alpha) <= sync_generation(load)
    assert best_step(load, alpha) <= sync_step(load)
    assert sync_step(load) / best_step(load, alpha) <= most_at_large_alpha(load) * (1 + 1e-9)


@given(positive, positive)
def test_as_many_workers_as_samples_gain_most(mean: float, longest: float) -> None:
    load = Load(workers=100, samples=100, mean=mean, longest=longest, train=1.0)
    assert sync_generation(load) / (mean / load.workers) == pytest.approx(most_at_full_width(load))


# One engine with so many places is so many workers: a step of this device takes 10 ms, however much it holds.
_PLACES, _STEP_S = 16, 0.01
_LOW, _HIGH = 200, 1800
_FLAT = {"tflops": 1e9, "memory_gb": 1e9, "bandwidth_tbs": 1e9, "link_gbs": 1e9, "network_gbs": 1e9, "host_gbs": 1e9,
         "cost": 1.0, "node": 8, "overhead_s": _STEP_S}  # fmt: skip
# Enough for a train step to take some of the time: operations a second that the trainer reaches.
_TRAINER = _FLAT | {"tflops": 0.8, "overhead_s": None}


def simulated(folder: Path, mode: str, alpha: float, groups: int, tflops: float = 1e9) -> Simulated:
    tree: dict[str, Any] = {
        "run": {"name": "bound", "mode": mode, "iterations": 8},
        "tasks": {"Flat": {"kind": "env", "env": "sim:flat", "max_tokens": 4096, "max_turns": 1}},
        "generation": {"max_model_len": 8192},
        "rollout": {"concurrency": 10_000},
        "buffer": {"batch_groups": groups, "group_size": 2, "alpha": alpha, "drop_uniform": False},
        "eval": {"every": 100, "episodes": 1},
        "checkpoint": {"every": 100},
        "simulate": {
            "model": "qwen3-8b",
            "probe": False,
            "batch": _PLACES,
            "generation": [{"hardware": "flat", "gpus": 1}],
            "training": {"hardware": "trainer", "gpus": 1, "step_s": 0},
            "hardware": {"flat": _FLAT, "trainer": _TRAINER | {"tflops": tflops}},
            "calibration": {"push_gibs": 1e9, "pull_gibs": 1e9, "load_gibs": 1e9},
            "tasks": {
                "Flat": {
                    "turns": {"mean": 1},
                    "prompt": {"mean": 1},
                    "observation": {"mean": 1},
                    "response": {"shape": "uniform", "low": _LOW, "high": _HIGH},
                }
            },
        },
    }
    simulation = make_simulation(tree)
    place = RunFolder(folder)
    place.create(simulation.config)
    try:
        return simulate(simulation, place)
    finally:
        place.close()


def load(samples: int, train: float = 0.0) -> Load:
    return Load(
        workers=_PLACES,
        samples=samples,
        mean=(_LOW + _HIGH) / 2 * _STEP_S,
        longest=_HIGH * _STEP_S,
        train=train,
    )


def mean_part(run: Simulated, *parts: str) -> float:
    rows = run.rows[2:-1]
    return sum(float(row.get(f"time/{part}") or 0) for row in rows for part in parts) / len(rows)


@pytest.mark.parametrize("groups", [8, 24, 96])
def test_synchronous_generation_stays_under_its_bound(tmp_path: Path, groups: int) -> None:
    run = simulated(tmp_path / "run", "sync_plus", 0.0, groups)
    form = load(2 * groups)
    assert mean_part(run, "get_batch") <= form.samples * sync_generation(form) * 1.03
    assert mean_part(run, "get_batch") >= form.generating * 0.9


@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_asynchronous_generation_stays_under_its_bound(tmp_path: Path, alpha: float) -> None:
    run = simulated(tmp_path / "run", "rollart", alpha, 24)
    form = load(48)
    step = sum(
        sum(float(value or 0) for key, value in row.items() if key.startswith("time/")) for row in run.rows[2:-1]
    )
    assert step / 5 <= form.samples * async_generation(form, alpha) * 1.03
    assert step / 5 >= form.generating * 0.9


def test_the_larger_side_decides_an_asynchronous_step(tmp_path: Path) -> None:
    run = simulated(tmp_path / "run", "rollart", 1.0, 24, tflops=100.0)
    train = mean_part(run, "train")
    whole = mean_part(run, "train", "get_batch", "wait_weights", "update", "suspend", "resume", "probe")
    form = load(48)
    assert train > 0
    assert whole <= max(form.samples * async_generation(form, 1.0), train) * 1.03
