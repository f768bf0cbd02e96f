"""The real pipeline for a few iterations: Ray, two vLLM engines, the trainer, the stores.

Actions have many tokens and alpha is 2, so that generations cross updates. Every trained token is scored again under
the weights of the version that its span names: labels that were wrong, caches that were stale, and weights that never
arrived would all show.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from envmanager import Trajectory, Turn
from rollart.config import load_config
from rollart.config.schema import Config
from rollart.observe.dashboard import Dashboard
from rollart.observe.metrics import read_metrics
from rollart.observe.trace import read_trace
from rollart.pipeline import controller
from rollart.runtime.folder import RunFolder
from rollart.runtime.launch import launch
from rollart.runtime.run import Run
from rollart.runtime.setting import Setting, prepare_model
from samplebuffer import Batch

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ITERATIONS = 6
ALPHA = 2
# A turn takes long enough that some are under way at every update, however fast the driver is.
TOKENS = 48


def configured(folder: Path) -> Config:
    return load_config(
        overrides=[
            f"run={{name: pipeline, folder: {folder}, iterations: {ITERATIONS}}}",
            f"tasks={{FrozenLake: {{actions_per_turn: {TOKENS}, max_turns: 6}}}}",
            f"buffer={{batch_groups: 4, group_size: 4, alpha: {ALPHA}, drop_uniform: false, spare_members: 1}}",
            "rollout={concurrency: 40}",
            "eval={every: 100, episodes: 16}",
            f"checkpoint={{every: 1, keep: {ITERATIONS}}}",
        ]
    )


class Recorder:
    """Keeps every batch on its way to the trainer. With a slow link, each publication ends after the next train step
    has begun, but for the last one, which an evaluation waits for."""

    def __init__(self, trainer: Any, *, slow_link: bool) -> None:
        self.batches: list[Batch] = []
        self._began = [asyncio.Event() for _ in range(ITERATIONS + 1)]
        self._train_step, self._publish = trainer.train_step, trainer.publish
        trainer.train_step = self.train_step
        if slow_link:
            trainer.publish = self.publish

    async def train_step(self, batch: Batch, step: int) -> Any:
        self.batches.append(batch)
        self._began[step].set()
        return await self._train_step(batch, step)

    async def publish(self, version: int) -> Any:
        push = await self._publish(version)
        if version + 1 < ITERATIONS:
            await self._began[version + 1].wait()
        return push


async def run_pipeline(config: Config, folder: RunFolder, *, slow_link: bool = False) -> list[Batch]:
    setting = Setting(config, prepare_model(config, folder.path))
    async with launch(config, folder, setting, None, lambda text: None) as parts:
        recorder = Recorder(parts.trainer, slow_link=slow_link)
        assert await Run(config, folder, setting, parts, Dashboard()).go(asyncio.Event())
    return recorder.batches


def check_run(config: Config, folder: RunFolder, batches: list[Batch]) -> list[dict[str, Any]]:
    rows = read_metrics(folder.path)
    assert [row["step"] for row in rows] == list(range(1, ITERATIONS + 1))
    check_bound(batches)
    check_ledger(rows)
    check_spans(batches)
    check_tokens(config, folder, batches)
    return rows


async def test_weights_that_arrive_beside_the_train_step_are_those_that_were_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "_SOON_S", 0.0)  # in a second, everything that the bound allows has been played
    config = configured(tmp_path)
    folder = RunFolder.of(config)
    folder.create(config)
    batches = await run_pipeline(config, folder, slow_link=True)
    folder.close()
    rows = check_run(config, folder, batches)
    assert [row["parity/max_abs"] is None for row in rows] == [True] * (ITERATIONS - 1) + [False]
    assert [row["version/served"] for row in rows] == [*range(ITERATIONS - 1), ITERATIONS]


async def test_the_six_steps_on_real_parts(tmp_path: Path) -> None:
    config = configured(tmp_path)
    folder = RunFolder.of(config)
    folder.create(config)
    batches = await run_pipeline(config, folder)
    folder.close()
    rows = check_run(config, folder, batches)
    check_steps(folder)
    for row in rows[1:]:
        assert row["parity/max_abs"] is not None
        assert row["parity/max_abs"] < 1e-3
        assert row["pull_exposed_s"] is not None


def check_bound(batches: list[Batch]) -> None:
    for batch in batches:
        assert len(batch.groups) == 4
        assert {len(group.samples) for group in batch.groups} == {4}
        assert batch.max_staleness <= ALPHA
        assert batch.max_lag <= ALPHA + 1


def check_ledger(rows: list[dict[str, Any]]) -> None:
    for number, row in enumerate(rows, 1):
        ledger = {key.removeprefix("ledger/"): row[key] for key in row if key.startswith("ledger/")}
        issued = ledger.pop("issued")
        assert issued == sum(ledger.values())
        assert ledger["delivered"] == number * 16
        assert ledger["failed"] == 0


def turns(batches: list[Batch]) -> Iterator[tuple[Trajectory, Turn]]:
    for batch in batches:
        for sample in batch.samples:
            for turn in sample.payload.turns:
                yield sample.payload, turn


def check_spans(batches: list[Batch]) -> None:
    crossing = 0
    for _, turn in turns(batches):
        edges = [(span.start, span.end) for span in turn.spans]
        assert edges[0][0] == 0
        assert edges[-1][1] == len(turn.token_ids) == len(turn.logprobs) == TOKENS
        assert all(left[1] == right[0] for left, right in itertools.pairwise(edges))
        versions = [span.version for span in turn.spans]
        assert versions == sorted(set(versions))
        crossing += len(versions) > 1
    assert crossing, "no generation crossed an update: the test has lost its point"
    for batch in batches:
        for sample in batch.samples:
            assert sample.start_version == sample.payload.turns[0].spans[0].version


def check_tokens(config: Config, folder: RunFolder, batches: list[Batch]) -> None:
    """Each token's log-probability is that of the version that its span names."""
    from rollart.trainers.state import TrainerState
    from rollart.trainers.torch_trainer import TorchTrainer

    setting = Setting(config, folder.path / "model")
    allowed = setting.allowed["FrozenLake"]
    trainers: dict[int, TorchTrainer] = {}
    worst = 0.0
    crossing = [turn for _, turn in turns(batches) if len(turn.spans) > 1][:40]
    plain = [turn for _, turn in turns(batches) if len(turn.spans) == 1][::20]
    for turn in crossing + plain:
        for span in turn.spans:
            if span.version not in trainers:
                trainers[span.version] = trainer = TorchTrainer(folder.path / "model", config.train)
                if span.version:
                    place = folder.checkpoints.folder / f"step-{span.version:06d}"
                    trainer.load_state_dict(TrainerState.load(place))
            (scored,) = trainers[span.version].logprobs([turn.prompt_ids], [turn.token_ids], allowed)
            pairs = zip(scored[span.start : span.end], turn.logprobs[span.start : span.end], strict=True)
            worst = max([worst, *(abs(ours - theirs) for ours, theirs in pairs)])
    assert len(trainers) > 2, "too few versions were seen"
    assert worst < 1e-4


def check_steps(folder: RunFolder) -> None:
    wanted = ("get_batch", "suspend", "update", "resume", "train")
    spans = sorted((e.ts or 0, e.name) for e in read_trace(folder.path / "trace.json") if e.ph == "X")
    names = [name for _, name in spans if name in wanted]
    iteration = ["get_batch", "suspend", "update", "resume", "train"]
    final = ["suspend", "update", "resume"]
    assert names == ["get_batch", "train", *(iteration * (ITERATIONS - 1)), *final]
