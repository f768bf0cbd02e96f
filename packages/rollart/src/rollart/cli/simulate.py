"""`rollart simulate`: a run on virtual time, its numbers, and where its report is."""

from __future__ import annotations

import argparse
import logging
import time

import yaml
from rich.console import Console
from rich.table import Table

from rollart.cli.train import log_to
from rollart.errors import ConfigError, RunExists
from rollart.observe.dashboard import Dashboard
from rollart.report import write_report
from rollart.runtime.folder import RunFolder
from rollart.runtime.interrupt import EXIT_INTERRUPTED
from rollart.simulate.build import check_fits
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
    if folder.exists() and not arguments.overwrite:
        told = "replace it with --overwrite, or give the new one a name with run.name=..."
        raise RunExists(f"{folder.path} holds a run already; {told}")
    check_fits(simulation)
    folder.create(simulation.config, overwrite=arguments.overwrite)
    log_to(folder, console)
    start = time.process_time()
    with Dashboard(console) as dashboard:
        try:
            simulated = simulate(simulation, folder, dashboard)
        except KeyboardInterrupt:
            dashboard.log("interrupted; a simulated run does not go on: start it anew with --overwrite")
            return EXIT_INTERRUPTED
        except ConfigError:
            raise
        except Exception as error:
            # The terminal gets the reason, the log file the traceback too.
            logging.getLogger("rollart").info("the simulation failed", exc_info=True)
            dashboard.log(f"the simulation failed: {type(error).__name__}: {error}")
            dashboard.log(f"logs: {folder.logs}")
            return 1
        finally:
            folder.close()
    seconds = time.process_time() - start
    _show(console, simulation, simulated, summarize(simulation, simulated), seconds)
    for fault in simulation.world.faults:
        if fault.at >= simulated.elapsed_s:
            console.print(f"never happened: the fault {fault.kind} at {fault.at:g} s, as the run ended before")
    console.print(f"report: {write_report([folder.path])}", soft_wrap=True)
    return 0


def _calibrated(arguments: argparse.Namespace, console: Console) -> Simulation:
    """The world of a real run, written beside it, and the run's own configuration with overrides in that world."""
    words = [str(arguments.config)] if arguments.config is not None else []
    if words and "=" not in words[0]:
        raise ConfigError("CONFIG", words[0], "a run that is fitted to brings its own; give overrides alone")
    path = arguments.calibrate / "calibrated.yaml"
    text = yaml.safe_dump(calibrate(arguments.calibrate), sort_keys=False)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        reason = f"the fitted world cannot be written there ({error.strerror}); fit to a copy of the run"
        raise ConfigError("--calibrate", str(path), reason) from None
    console.print(f"fitted: {path}", soft_wrap=True)
    name = f"{arguments.calibrate.resolve().name}-simulated"
    return load_simulation(path, [f"run.name={name}", *words, *arguments.overrides])


def _show(console: Console, simulation: Simulation, simulated: Simulated, summary: Summary, seconds: float) -> None:
    devices = " + ".join(f"{count} {name}" for name, count in simulation.gpus.items())
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in (
        ("devices", devices),
        ("step time", f"{summary.step_s:.1f} s ({_counted(summary, len(simulated.rows))})"),
        ("trained", f"{summary.tokens_per_s:,.0f} tokens/s, those of observations among them"),
        ("cost", f"{summary.cost:.3f} H20 hours for 1,000 trajectories"),
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
