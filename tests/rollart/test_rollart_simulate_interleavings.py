"""Hundreds of random worlds: whatever goes wrong and in whichever order things end, nothing is lost or hangs.

A seed decides the configuration, the latencies and the faults, an odd one also the order of what is ready at one
instant; what fails is repeated with
``pytest "test_rollart_simulate_interleavings.py::test_a_random_world_keeps_every_invariant[SEED]"``.
"""

from __future__ import annotations

import logging
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from rollart.runtime.folder import RunFolder
from rollart.simulate.catalog import builtin
from rollart.simulate.config import make_simulation
from rollart.simulate.run import Simulated, simulate

FEW, MANY = 40, 400


def world(seed: int) -> dict[str, Any]:
    """A small configuration in which everything may happen at once."""
    random = Random(seed)
    mode = random.choice(("rollart", "rollart", "rollart", "areal", "one_off", "sync_plus", "sync"))
    crossing = mode in ("rollart", "areal")
    apart = random.random() < 0.3
    fleets = [
        {"hardware": "H800", "gpus": random.randint(1, 3), "role": "prefill" if apart else "both"},
        {"hardware": "H20", "gpus": random.randint(1, 3), "role": "decode" if apart else "both"},
    ]
    return {
        "run": {"name": "random", "mode": mode, "seed": seed, "iterations": random.randint(2, 4)},
        "tasks": {"T": {"kind": "env", "env": "sim:t", "max_tokens": random.choice((64, 512)), "max_turns": 6}},
        "generation": {"max_model_len": random.choice((600, 4096)), "start_timeout_s": 3000.0},
        "buffer": {
            "batch_groups": random.randint(1, 4),
            "group_size": random.randint(1, 4),
            "alpha": random.choice((0.0, 0.5, 1.0, 2.0)) if crossing else 0.0,
            "spare_groups": random.randint(0, 2),
            "spare_members": random.randint(0, 2),
            "patience": random.choice((0.0, 1.0, 3.0)),
            "drop_uniform": False,
        },
        "train": {"minibatches": 1},
        "eval": {"every": 100, "episodes": 1},
        "checkpoint": {"every": random.choice((1, 100))},
        "simulate": {
            "model": "qwen3-8b",
            "generation": fleets,
            "training": {"hardware": "H800", "gpus": random.randint(1, 4)},
            "transport": random.choice(("store", "broadcast")),
            "prefix_cache": random.random() < 0.8,
            "hardware": {"H20": tight()} if random.random() < 0.3 else {},
            "placement": random.choice(("trajectory", "group")),
            "tasks": {
                "T": {
                    "turns": {"shape": "uniform", "low": 1, "high": 6},
                    "prompt": {"mean": 50, "std": 30, "low": 1},
                    "observation": {"mean": 30, "std": 30, "low": 1},
                    "response": {"mean": 60, "std": 90, "low": 1},
                    "instance": random.choice((0.0, 0.5)),
                    "latest_only": random.random() < 0.3,
                    "reset_s": {"mean": random.choice((0, 5)), "std": 5},
                    "step_s": {"mean": random.choice((0, 1)), "std": random.choice((0.0, 3.0))},
                    "reward_s": {"mean": random.choice((0, 2)), "std": 2},
                    "reset_fails": random.choice((0.0, 0.1)),
                    "reset_fail_s": {"mean": 3},
                    "step_fails": random.choice((0.0, 0.02)),
                }
            },
            "faults": [fault(random) for _ in range(random.randint(0, 3))],
        },
    }


def tight() -> dict[str, Any]:
    """An H20 whose memory has room for 5,000 tokens beside the model: a few contexts."""
    return msgspec.to_builtins(msgspec.structs.replace(builtin().device("H20"), memory_gb=19.0))


def fault(random: Random) -> dict[str, Any]:
    return {
        "kind": random.choice(("node", "freeze", "link", "environments")),
        "at": random.uniform(0, 200),
        "for_s": random.uniform(1, 100),
        "factor": random.uniform(0.05, 0.9),
        "slow": random.uniform(1, 4),
    }


def run(seed: int, folder: Path) -> Simulated:
    for name in ("envmanager", "llmproxy", "samplebuffer", "rollart"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    simulation = make_simulation(world(seed))
    place = RunFolder(folder)
    place.create(simulation.config)
    try:
        order = Random(seed) if seed % 2 else None
        return simulate(simulation, place, order=order)  # raises unless every invariant held to the end
    finally:
        place.close()


@pytest.mark.parametrize("seed", range(FEW))
def test_a_random_world_keeps_every_invariant(seed: int, tmp_path: Path) -> None:
    run(seed, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FEW, MANY))
def test_many_more_random_worlds_do_too(seed: int, tmp_path: Path) -> None:
    run(seed, tmp_path / "run")
