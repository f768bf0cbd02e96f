"""A summary counts neither the first iterations nor the last."""

from __future__ import annotations

from typing import Any

import pytest

from rollart.simulate.config import make_simulation
from rollart.simulate.run import Simulated
from rollart.simulate.summary import summarize


def row(step: int, seconds: float, delivered: int, stale: int) -> dict[str, Any]:
    ledger = dict.fromkeys(("surplus", "filtered", "failed", "cancelled"), 0) | {
        "delivered": delivered,
        "stale": stale,
    }
    return {
        "step": step,
        "time/train": seconds,
        "time/get_batch": seconds,
        "train/batch_tokens": 1000.0,
        "staleness/mean": 0.5,
        **{f"ledger/{name}": count for name, count in ledger.items()},
    }


def test_means_are_over_the_counted_iterations() -> None:
    simulation = make_simulation(
        {
            "tasks": {"Shop": {"kind": "env", "env": "sim:shop"}},
            "buffer": {"batch_groups": 10, "group_size": 10},
            "simulate": {
                "model": "qwen3-8b",
                "generation": [{"hardware": "H20", "gpus": 8}],
                "training": {"hardware": "H20", "gpus": 2},
                "tasks": {"Shop": "webshop"},
            },
        }
    )
    rows = [row(1, 99, 10, 5), row(2, 99, 20, 5), row(3, 4, 30, 5), row(4, 6, 40, 10), row(5, 99, 99, 99)]
    simulated = Simulated(
        rows=rows, elapsed_s=1.0, generation_used={}, training_used=0.0, rewards_used=None, turns=0, preemptions=0
    )
    summary = summarize(simulation, simulated)
    assert summary.counted == 2
    assert summary.step_s == pytest.approx(10.0)
    assert summary.tokens_per_s == pytest.approx(100.0)
    assert summary.stale == pytest.approx(5 / 25)
    assert summary.cost == pytest.approx(10 * 10 / 3600 / 100 * 1000)
