"""`rollart simulate`: a run on virtual time, its numbers, and where its report is."""

from __future__ import annotations

import argparse
import time

import yaml
from rich.console import Console
from rich.table import Table

from rollart.cli.train import log_to
from rollart.errors import ConfigError
from rollart.observe.dashboard import Dashboard
from rollart.report import write_report
from rollart.runtime.folder import RunFolder
from rollart.simulate.calibrate import calibrate
from rollart.simulate.config import Simulation, load_simulation
from rollart.simulate.run import Simulated, simulate
from rollart.simulate.summary import Summary, summarize


def run(arguments: argparse.Namespace) -> int:
    """Simulate a configuration. Returns the exit status."""
    console = Console()
    if arguments.calibrate is not None:
        simulation = _calibrated(arguments, console)
    elif arguments.config is not None:
        simulation = load_simulation(arguments.config, arguments.overrides)
    else:
        raise ConfigError("CONFIG", None, "name a YAML file, or a run with --calibrate RUN")
    folder = RunFolder.of(simulation.config)
    folder.create(simulation.config, overwrite=arguments.overwrite)
    try:
        log_to(folder, console)
        start = time.process_time()
        with Dashboard(console) as dashboard:
            simulated = simulate(simulation, folder, dashboard)
        seconds = time.process_time() - start
    finally:
        folder.close()
    _show(console, simulation, simulated, summarize(simulation, simulated), seconds)
    console.print(f"report: {write_report([folder.path])}", soft_wrap=True)
    return 0


def _calibrated(arguments: argparse.Namespace, console: Console) -> Simulation:
    """The world of a real run, written beside it, and the run's own configuration with overrides in that world."""
    words = [str(arguments.config)] if arguments.config is not None else []
    path = arguments.calibrate / "calibrated.yaml"
    console.print(f"fitting a world to {arguments.calibrate}: up to half a minute", soft_wrap=True)
    path.write_text(yaml.safe_dump(calibrate(arguments.calibrate), sort_keys=False), encoding="utf-8")
    console.print(f"fitted: {path}", soft_wrap=True)
    name = f"{arguments.calibrate.resolve().name}-simulated"
    return load_simulation(path, [f"run.name={name}", *words, *arguments.overrides])


def _show(console: Console, simulation: Simulation, simulated: Simulated, summary: Summary, seconds: float) -> None:
    devices = " + ".join(f"{count} {name}" for name, count in simulation.gpus.items())
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in (
        ("devices", devices),
        ("step time", f"{summary.step_s:.1f} s ({_counted(summary, len(simulated.rows))})"),
        ("throughput", f"{summary.tokens_per_s:,.0f} tokens/s"),
        ("cost a trajectory", f"{summary.cost:.3f} H20 hours per thousand"),
        ("staleness", f"{summary.staleness:.2f} on average, {summary.stale:.1%} thrown away for their age"),
        ("trainer busy", f"{simulated.training_used:.0%}"),
        *((f"{name} generation busy", f"{used:.0%}") for name, used in simulated.generation_used.items()),
    ):
        table.add_row(name, value)
    parts = ", ".join(f"{name} {value:.1f}" for name, value in summary.parts.items() if value >= 0.05)
    table.add_row("parts of a step", f"{parts} s")
    table.add_row("simulated", f"{simulated.elapsed_s:,.0f} s, {simulated.turns:,} turns in {seconds:.1f} CPU s")
    console.print(table)


def _counted(summary: Summary, ran: int) -> str:
    """Which iterations the means are of, and why not all."""
    last = summary.first + summary.counted - 1
    which = f"iteration {last}" if summary.counted == 1 else f"iterations {summary.first} to {last}"
    before = "" if summary.first == 1 else "those before fill empty queues"
    after = "" if last == ran else "the last commits its own weights"
    why = " and ".join(filter(None, (before, after)))
    return f"mean of {which} of {ran}" + (f": {why}" if why else "")
