"""A simulated world fitted to a real run: engines, trainer, environments and weight path.

Where all roles compute on the cores of one machine, the CPU seconds of each are what it has to do, and the simulated
machine shares its cores among them. How much of an engine's goes to launching steps, one run does not say; that part
is taken with which the simulated step is as long as the real one. Elsewhere a turn among n others takes `a + b n`
seconds, of which `a` is launching its two steps, and a train step `c + d tokens`. What is fitted is written as a
section `simulate`, to be read and changed like any other (tests/rollart/test_rollart_simulate_calibrate.py).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from msgspec import Struct

from rollart.cli.train import config_of
from rollart.config import Config
from rollart.errors import ConfigError
from rollart.observe.metrics import Row
from rollart.observe.runinfo import read_run
from rollart.runtime.folder import RunFolder
from rollart.simulate.catalog import GIB
from rollart.simulate.config import make_simulation
from rollart.simulate.lines import Line, between_halves, fit_line
from rollart.simulate.observed import Observed, number, wall
from rollart.simulate.run import simulate
from rollart.simulate.summary import CLOSING, WARM_UP
from rollart.simulate.trainer import Passes

_PARTS = (0.1, 0.3, 0.5, 0.7, 0.9)
_ITERATIONS = 8
# The size of a simulated engine's batches, and so its CPU seconds, follow from what it takes to launch one.
_ROUNDS = 2


class Computing(Struct, frozen=True):
    """What has to be done: a turn's seconds by the number at once, a train step's by its tokens, an update's, and
    the driver's for a turn where `cores` are shared.
    """

    turn: Line
    train: Line
    exposed_s: float
    cores: int = 0
    driver_s: float = 0.0


def calibrate(run: Path) -> dict[str, Any]:
    """The run's configuration with a section `simulate` that is fitted to it. Raises RunMissing, ConfigError."""
    config = config_of(run, ())
    if len(config.tasks) != 1:
        raise ConfigError("tasks", list(config.tasks), "a run of one task can be fitted")
    seen = Observed(run, config)
    info = read_run(run)
    cores = info.cores if info else None
    if not cores or not number(seen.rows[-1], "engines/cpu_s"):
        return _world(config, seen, _latencies(seen))
    return _matched(lambda turn: _world(config, seen, _computing(seen, turn, cores)), seen)


def _latencies(seen: Observed) -> Computing:
    """Of engines and a trainer that do not slow each other down: as long as each took."""
    train = between_halves(seen.points("trained_tokens", "time/train"))
    between = seen.mean("time/record", "time/other")
    return Computing(fit_line(seen.latencies), Line(train.start + between, train.slope), seen.mean("pull_exposed_s"))


def _computing(seen: Observed, turn: Line, cores: int) -> Computing:
    """Of roles that share the cores of this machine: the CPU seconds that each took."""
    train = between_halves(seen.points("trained_tokens", "trainer/cpu_s"))
    between = seen.mean("time/record", "time/other")
    return Computing(
        turn=turn,
        train=Line(train.start + between, train.slope),
        # Resuming is slow only for the driver, which sends all turns that waited.
        exposed_s=seen.mean("time/suspend", "time/update"),
        cores=cores,
        driver_s=max(0.0, seen.mean("driver/cpu_s") - between) / seen.turns,
    )


def _matched(world: Callable[[Line], dict[str, Any]], seen: Observed) -> dict[str, Any]:
    """Of worlds whose engines compute as much for a turn as the real ones, that whose steps are as long."""
    each = seen.mean("engines/cpu_s") / seen.turns
    at_once = fmean(count for count, _ in seen.latencies)
    real = _step(seen.rows[WARM_UP - 1 :])
    best: tuple[float, dict[str, Any]] = (float("inf"), {})
    for part in _PARTS:
        scale = 1.0
        for _ in range(_ROUNDS):
            tree = world(Line(scale * part * each * at_once, scale * (1 - part) * each))
            step, simulated = _simulated(tree)
            scale *= each / simulated
        best = min(best, (abs(step / real - 1), tree), key=lambda found: found[0])
    return best[1]


def _simulated(tree: dict[str, Any]) -> tuple[float, float]:
    """Seconds of a step, and the engines' CPU seconds of a turn."""
    with tempfile.TemporaryDirectory() as place:
        shorter = {"iterations": _ITERATIONS, "folder": place, "name": "tried"}
        simulation = make_simulation(tree | {"run": tree["run"] | shorter})
        folder = RunFolder.of(simulation.config)
        folder.create(simulation.config)
        try:
            simulated = simulate(simulation, folder)
        finally:
            folder.close()
    engines = sum(number(row, "engines/cpu_s") for row in simulated.rows)
    return _step(simulated.rows[WARM_UP:]), engines / simulated.turns


def _step(rows: list[Row]) -> float:
    return fmean(map(wall, rows[:-CLOSING]))


def _world(config: Config, seen: Observed, computing: Computing) -> dict[str, Any]:
    """The configuration with a section `simulate`."""
    tree: dict[str, Any] = msgspec.to_builtins(config)
    bare = make_simulation(tree | {"simulate": {"tasks": dict.fromkeys(config.tasks, "tiny-lake")}})
    profile = seen.profile()
    parameters = bare.shape.parameters
    tokens = profile["observation"]["mean"] + seen.response
    rate = 2 * parameters * tokens / max(computing.turn.slope, 1e-9)
    # The simulated batch has the mean length of all trajectories, the real one that of those that were trained on.
    longer = seen.mean("trained_tokens") / bare.batch / (seen.length * seen.response)
    work = Passes(False, False, False).count * 2 * parameters * tokens / seen.response
    size = parameters * bare.shape.bytes_each / GIB
    tree["generation"]["affinity"] = {"default": "fitted"}
    tree["simulate"] = {
        "batch": config.generation.max_num_seqs,
        "host": {"cores": computing.cores, "turn_s": computing.driver_s} if computing.cores else None,
        "training": {
            "hardware": "fitted",
            "gpus": 1,
            "reference": False,
            "proximal": False,
            "recompute": False,
            "step_s": computing.train.start,
        },
        "generation": [{"hardware": "fitted", "gpus": config.generation.workers}],
        "hardware": {
            "fitted": {
                "tflops": rate / 1e12,
                "memory_gb": 16.0,
                "bandwidth_tbs": 1.0,
                "link_gbs": 5.0,
                "network_gbs": 1.0,
                "host_gbs": 5.0,
                "cost": 1.0,
                "node": 1,
                "overhead_s": computing.turn.start / 2,
            }
        },
        "calibration": {
            "compute": 1.0,
            "memory": 1.0,
            "training": work / max(longer * computing.train.slope, 1e-9) / rate,
            "push_gibs": size / seen.mean("push_s"),
            "pull_gibs": size / seen.mean("pull_accumulated_s"),
            "load_gibs": size / computing.exposed_s,
        },
        "tasks": dict.fromkeys(config.tasks, profile),
    }
    return tree
