"""A summary counts neither the first iterations nor the last."""

from __future__ import annotations

from typing import Any

import pytest

from rollart.cli.simulate import _counted
from rollart.simulate.config import make_simulation
from rollart.simulate.run import Simulated
from rollart.simulate.summary import Summary, summarize


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
    assert (summary.first, summary.counted) == (3, 2)
    assert summary.step_s == pytest.approx(10.0)
    assert summary.steps == [8.0, 12.0]
    assert summary.tokens_per_s == pytest.approx(100.0)
    assert summary.stale == pytest.approx(5 / 25)
    assert summary.cost == pytest.approx(10 * 10 / 3600 / 100 * 1000)


@pytest.mark.parametrize(
    ("first", "counted", "ran", "words"),
    [
        (
            3,
            5,
            8,
            "mean of iterations 3 to 7 of 8: those before fill empty queues and the last commits its own weights",
        ),
        (3, 1, 4, "mean of iteration 3 of 4: those before fill empty queues and the last commits its own weights"),
        (1, 1, 2, "mean of iteration 1 of 2: the last commits its own weights"),
        (1, 1, 1, "mean of iteration 1 of 1"),
    ],
)
def test_it_is_said_which_iterations_count_and_why(first: int, counted: int, ran: int, words: str) -> None:
    names = ("step_s", "tokens_per_s", "cost", "staleness", "stale", "push_s", "pull_s", "exposed_s")
    nothing = dict.fromkeys(names, 0.0)
    summary = Summary(first=first, counted=counted, parts={}, steps=[0.0] * counted, **nothing)
    assert _counted(summary, ran) == words
