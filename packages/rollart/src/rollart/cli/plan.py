"""`rollart plan`: the best ways to use a set of devices, what each change buys, and a configuration to run."""

from __future__ import annotations

import argparse
import logging
import os
import signal
from collections.abc import Mapping
from math import inf
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from rollart.errors import ConfigError
from rollart.planner.judge import Judged
from rollart.planner.search import Plan, Search, fleets_within
from rollart.runtime.interrupt import EXIT_INTERRUPTED
from rollart.simulate.config import make_simulation, read_tree
from rollart.simulate.errors import Broken


def run(arguments: argparse.Namespace) -> int:
    """Search, print, and write the best configuration. Returns the exit status."""
    logging.getLogger().setLevel(logging.ERROR)  # what fails in a simulated world is no news
    console = Console()
    _check(arguments)
    tree = read_tree(arguments.config, arguments.overrides)
    given = make_simulation(tree)
    if arguments.cost is not None:
        classes = parse_classes(arguments.classes, given.catalog.hardware) if arguments.classes else list(given.gpus)
        fleets = fleets_within(given.catalog, classes, arguments.cost)
        if not fleets:
            reason = f"no pairs of nodes of {', '.join(classes)} cost that much, or up to 5 % less, an hour"
            raise ConfigError("--cost", arguments.cost, reason)
    else:
        fleets = [parse_gpus(arguments.gpus, given.catalog.hardware)]
    search = Search(
        tree,
        width=5 if arguments.quick else 10,
        rounds=(5,) if arguments.quick else (5, 8),
        processes=arguments.processes or len(os.sched_getaffinity(0)),
        tell=lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True),
    )
    mixtures = f"{len(fleets)} mixtures of devices" if len(fleets) > 1 else "these devices"
    console.print(f"ranking the ways to use {mixtures} by the closed form")
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # both end it with the best so far
    try:
        plan, status = search.plan(fleets), 0
    except Broken as error:
        console.print(f"{error}; nothing is written", markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        so_far, status = search.so_far(), EXIT_INTERRUPTED
        if so_far is None:
            console.print("interrupted; nothing was simulated before, so nothing is written")
            return status
        console.print("interrupted; the best so far:")
        plan = so_far
    finally:
        signal.signal(signal.SIGTERM, before)
    by = plan.best[0].by
    part = f", one in {by} of their devices, groups and environments" if by > 1 else ""
    failed = f", {plan.failed} failed" if plan.failed else ""
    console.print(f"{plan.considered} candidates by the closed form, {plan.simulated} simulated{part}{failed}")
    _show(console, plan)
    best = plan.best[0].candidate.tree(tree)
    arguments.out.write_text(yaml.safe_dump(best, sort_keys=False, allow_unicode=True), encoding="utf-8")
    words = f"rollart simulate {arguments.out} run.name={arguments.out.stem}"
    console.print(f"written: {arguments.out}  (try it: {words})", soft_wrap=True)
    return status


def _check(arguments: argparse.Namespace) -> None:
    """What would only be noticed after the search, or not at all. Raises ConfigError."""
    if arguments.out.is_dir() or not os.access(arguments.out.absolute().parent, os.W_OK):
        raise ConfigError("--out", str(arguments.out), "name a file in a folder that can be written to")
    if arguments.processes < 0:
        raise ConfigError("--processes", arguments.processes, "give a number of simulations, or 0 for all cores")
    if arguments.classes and arguments.cost is None:
        raise ConfigError("--classes", arguments.classes, "goes with --cost; --gpus names its classes itself")
    if arguments.cost is not None and not 0 < arguments.cost < inf:
        raise ConfigError("--cost", arguments.cost, "give a budget above 0, in H20 hours an hour")


def parse_classes(text: str, known: Mapping[str, Any]) -> list[str]:
    """`h800,h20` as classes. Raises ConfigError."""
    names = {name.lower(): name for name in known}
    for name in text.split(","):
        if name.strip().lower() not in names:
            raise ConfigError("--classes", name, f"give some of {', '.join(known)}")
    return list(dict.fromkeys(names[name.strip().lower()] for name in text.split(",")))


def parse_gpus(text: str, known: Mapping[str, Any]) -> dict[str, int]:
    """`h800=96,h20=32` as devices by class. Raises ConfigError."""
    names = {name.lower(): name for name in known}
    gpus: dict[str, int] = {}
    for item in text.split(","):
        name, _, count = item.partition("=")
        if name.strip().lower() not in names or not count.strip().isdigit() or not int(count):
            raise ConfigError("--gpus", item, f"write CLASS=COUNT with a class of {', '.join(known)}")
        if names[name.strip().lower()] in gpus:
            raise ConfigError("--gpus", item, "names a class again")
        gpus[names[name.strip().lower()]] = int(count)
    return gpus


def _show(console: Console, plan: Plan) -> None:
    table = Table(
        "configuration", "step s", "by form", "trained/s", "cost", "busy", "stale", box=None, pad_edge=False
    )
    rows = [(judged.candidate.words, judged) for judged in plan.best]
    if plan.start is not None:
        rows.append((f"as given: {plan.start.candidate.words}", plan.start))
    for words, judged in rows:
        table.add_row(words, *_numbers(judged))
    console.print(table)
    console.print(
        "by form: the step by the closed form; trained/s: tokens; cost: H20 hours for 1,000 trajectories; "
        "stale: mean staleness (part thrown away for its age)"
    )
    if plan.margin >= 0.0005:
        console.print(f"step times that differ by less than {plan.margin:.1%} are as good as the same")
    if plan.start is not None:
        console.print("what each change buys, one after the other:")
        before = plan.start
        wide = max([len("altogether"), *(len(name) for name, _ in plan.steps)])
        for name, judged in plan.steps:
            console.print(f"  {name:{wide}} {_gain(before, judged, plan.margin)}")
            before = judged
        console.print(f"  {'altogether':{wide}} {_gain(plan.start, plan.best[0], plan.margin)}")


def _gain(before: Judged, after: Judged, margin: float) -> str:
    first, then = before.summary.step_s, after.summary.step_s
    noise = "  (not more than noise)" if max(first, then) <= min(first, then) * (1 + margin) else ""
    return f"{first:8.1f} -> {then:8.1f} s  {first / then:.2f} x{noise}"


def _numbers(judged: Judged) -> tuple[str, ...]:
    summary, simulated = judged.summary, judged.simulated
    busy = " ".join(f"{name} {used:.0%}" for name, used in simulated.generation_used.items())
    return (
        f"{summary.step_s:.1f}",
        f"{judged.estimated_s:.1f}",
        f"{judged.by * summary.tokens_per_s:,.0f}",
        f"{summary.cost:.2f}",
        f"{busy} train {simulated.training_used:.0%}",
        f"{summary.staleness:.2f} ({summary.stale:.0%} lost)",
    )
