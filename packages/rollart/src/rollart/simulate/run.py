"""A simulated run: the product's own run on a loop whose time jumps to the next event.

Invariants, checked after every simulation (tests/rollart/test_rollart_simulate_run.py): the ledger balances in every
row, no mode that evicts trains a trajectory past the bound, every iteration ends, and the same configuration gives
the same rows.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from functools import partial
from io import StringIO
from math import ceil
from pathlib import Path
from random import Random
from typing import Any

from msgspec import Struct
from rich.console import Console

from rollart.observe.dashboard import Dashboard
from rollart.observe.metrics import LEDGER_COLUMNS, Row, read_metrics
from rollart.observe.runinfo import RunInfo, write_run
from rollart.pipeline.modes import MODES
from rollart.runtime.beside import beside
from rollart.runtime.checkpoint import Checkpoints, RunState
from rollart.runtime.folder import RunFolder
from rollart.runtime.garbage import rarely_searched
from rollart.runtime.run import Run
from rollart.simulate.build import World, make_world
from rollart.simulate.clock import VirtualLoop
from rollart.simulate.config import Simulation
from rollart.simulate.errors import Broken
from rollart.simulate.faults import happen

# A simulation makes objects faster than a run, and hardly a cycle.
_YOUNG = 50_000


class Simulated(Struct, frozen=True, kw_only=True):
    """What a simulation came to. `rows` are those of metrics.jsonl."""

    rows: list[Row]
    elapsed_s: float
    generation_used: dict[str, float]
    """By class, the part of the time that engines had something to generate."""
    training_used: float
    rewards_used: float | None
    turns: int
    preemptions: int


class NoCheckpoints(Checkpoints):
    """Takes the time of a checkpoint and writes nothing: a simulated run starts anew."""

    async def write(self, state: RunState, save_trainer: Any) -> Path:
        await save_trainer(self.folder)
        return self.folder


def simulate(
    simulation: Simulation, folder: RunFolder, dashboard: Dashboard | None = None, order: Random | None = None
) -> Simulated:
    """Run it to the end in a folder that was created; raises what ends it early, and Broken. With `order`, what is
    ready at one instant runs in any.
    """
    folder.checkpoints = NoCheckpoints(folder.path / "checkpoints")
    with rarely_searched(_YOUNG), asyncio.Runner(loop_factory=partial(VirtualLoop, order)) as runner:
        simulated = runner.run(_simulate(simulation, folder, dashboard or Dashboard(Console(file=StringIO()))))
    check_rows(simulation, simulated.rows)
    return simulated


async def _simulate(simulation: Simulation, folder: RunFolder, dashboard: Dashboard) -> Simulated:
    world = make_world(simulation)
    parts = world.parts()
    run = Run(simulation.config, folder, world.setting, parts, dashboard)
    info = _info(simulation)
    write_run(folder.path, info)
    try:
        await beside(run.go(asyncio.Event()), happen(world))
    except asyncio.CancelledError:
        info.status, info.reason = "interrupted", "a simulated run does not go on; start it anew"
        raise
    except BaseException as error:
        info.status, info.reason = "failed", f"{type(error).__name__}: {error}"
        raise
    else:
        info.status = "finished"
    finally:
        info.ended, info.wall_s = datetime.now(UTC), run.elapsed_s
        write_run(folder.path, info)
    return _outcome(world, folder, run.elapsed_s)


def _outcome(world: World, folder: RunFolder, elapsed: float) -> Simulated:
    classes: dict[str, list[float]] = {}
    for engine in world.engines:
        classes.setdefault(engine.hardware, []).append(engine.busy.seconds() / elapsed)
    return Simulated(
        rows=read_metrics(folder.path),
        elapsed_s=elapsed,
        generation_used={name: sum(each) / len(each) for name, each in classes.items()},
        training_used=world.trainer.busy.seconds() / elapsed,
        rewards_used=world.rewards.used(elapsed),
        turns=sum(engine.generations for engine in world.engines),
        preemptions=sum(engine.preemptions for engine in world.engines),
    )


def check_rows(simulation: Simulation, rows: list[Row]) -> None:
    """Raise Broken unless the rows say that every invariant held."""
    config = simulation.config
    if len(rows) != config.run.iterations:
        raise Broken(f"{len(rows)} of {config.run.iterations} iterations ended")
    bound = ceil(config.buffer.alpha)
    for row in rows:
        columns = {name: int(row[f"ledger/{name}"] or 0) for name in LEDGER_COLUMNS}
        if columns.pop("issued") != sum(columns.values()):
            raise Broken(f"the ledger of step {row['step']} does not balance: {columns}")
        if MODES[config.run.mode].evict and (row["staleness/max"] or 0) > bound:
            raise Broken(f"step {row['step']} trained staleness {row['staleness/max']}, the bound is {bound}")


def _info(simulation: Simulation) -> RunInfo:
    config = simulation.config
    return RunInfo(
        name=config.run.name,
        status="running",
        mode=config.run.mode,
        seed=config.run.seed,
        iterations=config.run.iterations,
        alpha=config.buffer.alpha,
        parity_limit=config.weights.parity_limit,
        started=datetime.now(UTC),
        cores=simulation.world.host.cores if simulation.world.host else None,
    )
