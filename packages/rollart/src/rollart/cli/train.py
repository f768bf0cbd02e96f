"""`rollart train` and `resume`: which run is meant, then the training, then where its report is."""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler

from rollart.config import Config, differing, load_config
from rollart.errors import RollArtError, RunExists, RunMissing
from rollart.observe.dashboard import Dashboard
from rollart.observe.runinfo import read_run
from rollart.runtime.folder import RunFolder
from rollart.runtime.interrupt import EXIT_INTERRUPTED
from rollart.tasks import check_tasks

# How long and where a run goes on, and the schedule that follows from it: these do not make it another run.
_OF_THE_RUN = ("run.", "train.total", "train.seed")


def train(arguments: argparse.Namespace) -> int:
    """Train, resume, or say that the run is done. Returns the exit status."""
    config = load_config(arguments.config, arguments.overrides)
    console = Console()
    if arguments.dry_run:
        from rollart.plan import plan

        console.print(plan(config), highlight=False, markup=False)
        _check_tasks(config)
        return 0
    folder = RunFolder.of(config)
    if arguments.go_on and _done(config, folder):
        console.print(f"{folder.path} is done; its report is {folder.report}", soft_wrap=True, markup=False)
        console.print("train it anew with --overwrite, or under another name with run.name=...", soft_wrap=True)
        return 0
    _check_tasks(config)
    resume = arguments.resume or (arguments.go_on and folder.checkpoints.latest() is not None)
    if resume:
        folder.reopen(config)
    else:
        if arguments.go_on and folder.exists():
            console.print(f"{folder.path} has no checkpoint yet: starting it again", soft_wrap=True, markup=False)
        folder.create(config, overwrite=arguments.overwrite or arguments.go_on)
    try:
        return _train(config, folder, console, resume=resume)
    finally:
        folder.close()


def resume(run: Path, overrides: Sequence[str]) -> int:
    """Continue the run in a folder from its last checkpoint. Returns the exit status."""
    config = config_of(run, overrides)
    folder, console = RunFolder.of(config), Console()
    if _finished(config, folder):
        more = f"go on with a larger run.iterations, e.g. {2 * config.run.iterations}"
        console.print(f"{folder.path} is done; {more}", soft_wrap=True, markup=False)
        return 0
    folder.reopen(config)
    try:
        return _train(config, folder, console, resume=True)
    finally:
        folder.close()


def _check_tasks(config: Config) -> None:
    """Raise ConfigError for tasks that cannot be played here, or not with the given model's tokenizer."""
    from rollart.runtime.setting import codec_of

    check_tasks(config.tasks, codec_of(Path(config.model.path)) if config.model.path else None)


def config_of(run: Path, overrides: Sequence[str]) -> Config:
    """A run's own configuration, wherever its folder lies now. Raises RunMissing."""
    stored = run / "config.yaml"
    if not stored.is_file():
        raise RunMissing(f"{run} holds no run (no config.yaml)")
    place = run.resolve()
    return load_config(stored, [*overrides, f"run.folder={place.parent}", f"run.name={place.name}"])


def _train(config: Config, folder: RunFolder, console: Console, *, resume: bool) -> int:
    from rollart.runtime.training import train

    log_to(folder, console)
    with Dashboard(console) as dashboard:
        try:
            info = asyncio.run(train(config, folder, dashboard, resume=resume))
        except Exception as error:
            tell("the run failed", error, dashboard)
            dashboard.log(f"logs: {folder.logs}   report so far: {folder.report}")
            dashboard.log(_how_to_go_on(folder))
            return 1
    console.print(f"{info.status}; report: {folder.report}", soft_wrap=True, markup=False)
    return 0 if info.status == "finished" else EXIT_INTERRUPTED


def tell(what: str, error: Exception, dashboard: Dashboard) -> None:
    """The terminal gets the reason, the log file the traceback too, and the one in a worker."""
    from rollart.distributed.errors import in_words

    logging.getLogger("rollart").info(what, exc_info=True)
    kind = "" if isinstance(error, RollArtError) else f"{type(error).__name__}: "
    dashboard.log(f"{what}: {kind}{in_words(error)}")


def _how_to_go_on(folder: RunFolder) -> str:
    if steps := folder.checkpoints.steps():
        return f"to go on after iteration {steps[-1]}: rollart resume {folder.path}"
    return "there is no checkpoint to go on from; start it anew with --overwrite"


def _done(config: Config, folder: RunFolder) -> bool:
    """Whether the folder holds just this run, finished. Raises RunExists when it holds another."""
    info = read_run(folder.path)
    if info is None or info.status != "finished":
        return False
    other = _others(config, folder)
    if other:
        raise RunExists(f"{folder.path} is done, with another {other[0]}; give this one a name with run.name=...")
    return _finished(config, folder)


def _finished(config: Config, folder: RunFolder) -> bool:
    """Whether the run in the folder has ended where `config` would end it."""
    info = read_run(folder.path)
    if info is None or info.status != "finished" or _others(config, folder):
        return False
    stored = folder.stored_config().run
    return config.run.iterations <= stored.iterations and config.run.stop_at_success == stored.stop_at_success


def _others(config: Config, folder: RunFolder) -> list[str]:
    """The keys in which the stored configuration is that of another run."""
    return [key for key in differing(config, folder.stored_config()) if not key.startswith(_OF_THE_RUN)]


def log_to(folder: RunFolder, console: Console) -> None:
    """Everything goes to logs/driver.log; warnings to the terminal too."""
    file = logging.FileHandler(folder.logs / "driver.log")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    terminal = RichHandler(console=console, level=logging.WARNING, show_path=False)
    logging.basicConfig(level=logging.INFO, handlers=[file, terminal], force=True)
