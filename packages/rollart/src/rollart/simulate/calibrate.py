"""A simulated world fitted to a real run: engines, trainer, environments and weight path.

Where all roles compute on the cores of one machine, the CPU seconds of each are what it has to do, and the simulated
machine shares its cores among them. What of an engine's goes to launching steps is seen in the evaluation before
training, when few turns run at once and nobody trains; in all turns where there was none. Elsewhere a turn among n
others takes `a + b n` seconds, of which `a` is launching its two steps, and a train step `c + d tokens`. What is
fitted is written as a section `simulate`, to be read and changed like any other
(tests/rollart/test_rollart_simulate_calibrate.py).
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from msgspec import Struct

from rollart.cli.train import config_of
from rollart.config import Config
from rollart.errors import ConfigError
from rollart.observe.runinfo import read_run
from rollart.simulate.catalog import GIB, builtin
from rollart.simulate.config import make_simulation
from rollart.simulate.lines import Line, between_halves, fit_line
from rollart.simulate.observed import Observed, number
from rollart.simulate.trainer import Passes


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
    return _world(config, seen, _computing(seen, cores))


def _latencies(seen: Observed) -> Computing:
    """Of engines and a trainer that do not slow each other down: as long as each took."""
    train = between_halves(seen.points("trained_tokens", "time/train"))
    between = seen.mean("time/record", "time/other")
    return Computing(fit_line(seen.latencies), Line(train.start + between, train.slope), seen.mean("pull_exposed_s"))


def _computing(seen: Observed, cores: int) -> Computing:
    """Of roles that share the cores of a machine: the CPU seconds that each took."""
    each = seen.mean("engines/cpu_s") / seen.turns
    at_once = fmean(count for count, _ in seen.latencies)
    launching = min(fit_line(seen.alone or seen.latencies).start, each * at_once)
    train = between_halves(seen.points("trained_tokens", "trainer/cpu_s"))
    between = seen.mean("time/record", "time/other")
    return Computing(
        turn=Line(launching, each - launching / at_once),
        train=Line(train.start + between, train.slope),
        # Resuming is slow only for the driver, which sends all turns that waited.
        exposed_s=seen.mean("time/suspend", "time/update"),
        cores=cores,
        driver_s=max(0.0, seen.mean("driver/cpu_s") - between) / seen.turns,
    )


def _world(config: Config, seen: Observed, computing: Computing) -> dict[str, Any]:
    """The configuration with a section `simulate`."""
    tree: dict[str, Any] = msgspec.to_builtins(config)
    anything = dict.fromkeys(config.generation.hardware, msgspec.to_builtins(builtin().hardware["cpu"]))
    bare = make_simulation(
        tree | {"simulate": {"tasks": dict.fromkeys(config.tasks, "tiny-lake"), "hardware": anything}}
    )
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
