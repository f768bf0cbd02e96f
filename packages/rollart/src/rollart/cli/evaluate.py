"""`rollart eval`: how good a run's last checkpoint is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from rollart.cli.train import config_of, log_to, tell
from rollart.observe.dashboard import Dashboard
from rollart.runtime.folder import RunFolder


def evaluate(run: Path, overrides: Sequence[str]) -> int:
    """Print the success rate of each task on held-out instances. Returns the exit status."""
    from rollart.runtime.evaluation import success_of

    config = config_of(run, overrides)
    folder = RunFolder.of(config)
    folder.hold(config)
    console = Console()
    try:
        log_to(folder, console)
        with Dashboard(console) as dashboard:
            try:
                measured = asyncio.run(success_of(config, folder, dashboard.log))
            except Exception as error:
                tell("the evaluation failed", error, dashboard)
                dashboard.log(f"logs: {folder.logs}")
                return 1
    finally:
        folder.close()
    console.print(f"iteration {measured.step}, version {measured.version}: success {measured.success:.3f}")
    for task, rate in measured.by_task.items():
        console.print(f"  {task}: {rate:.3f}", highlight=False)
    return 0
