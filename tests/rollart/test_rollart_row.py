"""A row of metrics says what was measured, and None where nothing was."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollart.observe.metrics import REQUIRED
from rollart.observe.steptime import StepTime
from rollart.pipeline.iteration import Iteration, Switch
from rollart.pipeline.ports import Trained
from rollart.pipeline.row import metrics_row
from rollart.pipeline.weights import Staged
from samplebuffer import SampleBuffer


async def buffer_with_a_batch(tasks: Sequence[str] = ("a", "a")) -> tuple[SampleBuffer, Any]:
    """Two samples, one generated a version ago; the trainer is one ahead of generation."""
    buffer = SampleBuffer(iter(["a"]), batch_groups=1, group_size=2, alpha=1)
    old = await buffer.next_ticket()
    old.stamp(0)
    buffer.advance(1)
    new = await buffer.next_ticket()
    new.stamp(1)
    old.finish(SimpleNamespace(tokens=30, task=tasks[0]), 1.0)
    new.finish(SimpleNamespace(tokens=12, task=tasks[1]), 0.0)
    return buffer, await buffer.get_batch(trainer_version=2)


async def row(
    switch: Switch | None, tasks: Sequence[str] = ("a", "a"), cpu: Mapping[str, float] | None = None
) -> dict[str, Any]:
    buffer, batch = await buffer_with_a_batch(tasks)
    time = StepTime(10.0, 14.0, {"get_batch": 3_000_000_000, "train": 1_000_000_000})
    iteration = Iteration(7, batch, 1, Trained(3, {"loss": 0.5}), switch, None, time)
    return metrics_row(iteration, buffer.stats(), elapsed_s=99.0, tokens=400, cpu=cpu or {})


async def test_staleness_and_lag_are_counted_from_their_own_clocks() -> None:
    written = await row(None)
    assert (written["staleness/mean"], written["staleness/max"]) == (0.5, 1)
    assert (written["lag/mean"], written["lag/max"]) == (1.5, 2)
    assert (written["reward/mean"], written["success/mean"]) == (0.5, 0.5)
    assert (written["trained_tokens"], written["staleness/over"]) == (42, 0.0)
    assert written["tokens_per_s"] == pytest.approx(100.0)
    assert (written["version"], written["version/served"], written["train/loss"]) == (3, 1, 0.5)
    assert written["ledger/issued"] == written["ledger/delivered"] == 2
    assert (written["time/get_batch"], written["time/train"]) == (3.0, 1.0)


async def test_tasks_are_told_apart_where_there_are_several() -> None:
    written = await row(None, ("a", "b"))
    assert (written["reward/mean/a"], written["reward/mean/b"]) == (1.0, 0.0)
    assert not any(key.startswith("reward/mean/") for key in await row(None))


async def test_every_required_key_is_there_and_the_unmeasured_is_none() -> None:
    written = await row(None)
    assert set(REQUIRED) <= set(written)
    assert [written[key] for key in ("parity/max_abs", "push_s", "pull_exposed_s", "eval/success")] == [None] * 4


async def test_every_key_is_explained_in_the_manual() -> None:
    manual = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    first_cells = re.findall(r"^\| (`.*?`) \|", manual.partition("## Every metric")[2], re.MULTILINE)
    explained = [re.sub("[A-Z]+", ".+", name) for cell in first_cells for name in re.findall("`(.+?)`", cell)]
    staged = Staged(1, "d", 0.1, 0.2, 30, (10, 20))
    written = await row(Switch(staged, 0.3, 1e-5, 0), ("a", "b"))
    assert [key for key in written if not any(re.fullmatch(name, key) for name in explained)] == []


async def test_a_switch_brings_its_three_costs_apart() -> None:
    staged = Staged(version=2, digest="d", push_s=0.1, pull_s=0.2, nbytes=5)
    written = await row(Switch(staged, exposed_s=0.3, parity=1e-6, ended=0))
    assert [written[key] for key in ("push_s", "pull_accumulated_s", "pull_exposed_s")] == [0.1, 0.2, 0.3]
    assert written["parity/max_abs"] == 1e-6


async def test_the_drivers_share_is_of_the_wall_time() -> None:
    written = await row(None, cpu={"driver": 1.0, "engines": 3.0})
    assert (written["driver/cpu_share"], written["engines/cpu_s"], written["trainer/cpu_s"]) == (0.25, 3.0, None)
    assert (await row(None))["driver/cpu_share"] is None


async def test_what_each_rank_published_is_told() -> None:
    staged = Staged(1, "d", 0.1, 0.2, 30, (10, 20))
    measured = await row(Switch(staged, 0.3, 1e-5, 0))
    assert [measured[f"push_bytes{rank}"] for rank in ("", "/train-0", "/train-1")] == [30, 10, 20]
