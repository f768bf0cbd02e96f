"""The `rollart` command: parses, calls the package, prints. No decision about training is taken here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rollart.errors import RollArtError, unwritable


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (0 done, 1 failed, 2 bad input, 130 interrupted)."""
    arguments = _parse(argv)
    try:
        return int(arguments.command(arguments))
    except RollArtError as error:
        print(f"rollart: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if (told := unwritable(error, Path())) is None:
            raise
        print(f"rollart: {told}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """argparse takes no positional after an option; KEY=VALUE may stand anywhere."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    for word in rest:
        if word.startswith("-") or "=" not in word or not hasattr(arguments, "overrides"):
            parser.error(f"unrecognized argument: {word}")
        arguments.overrides.append(word)
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rollart", description="Disaggregated agentic reinforcement learning for language models."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_train(commands)
    _add_resume(commands)
    _add_eval(commands)
    _add_simulate(commands)
    init = commands.add_parser("init", help="write a configuration with every key explained")
    init.add_argument("config", type=Path, help="the YAML file to write")
    init.add_argument("--env", help="an environment by name, e.g. gymnasium:Taxi-v4 (default: FrozenLake)")
    init.set_defaults(command=_init)
    report = commands.add_parser(
        "report",
        help="write the HTML report of one run, or compare several",
        description="Write one HTML file that loads nothing from elsewhere: a run, or several beside each other.",
    )
    report.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run folder, e.g. runs/frozenlake")
    report.add_argument(
        "--out",
        type=Path,
        help="where to write it (default: report.html in the run, or comparison.html beside the first of several)",
    )
    report.set_defaults(command=_report)
    doctor = commands.add_parser(
        "doctor",
        help="what is installed, what is missing, what to do",
        description="Look at this machine. Exits with 1 when something is missing that every run needs.",
    )
    doctor.set_defaults(command=_doctor)
    _add_serve_reward(commands)
    return parser


def _add_train(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    train = commands.add_parser(
        "train",
        help="train a model",
        description="Train with a configuration. Keys can be overridden: train.lr=5e-4 run.name=try2",
        epilog="`rollart init my.yaml` writes a configuration with every key explained.",
    )
    train.add_argument("config", type=Path, help="a YAML file, e.g. examples/frozenlake.yaml")
    train.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help="overrides such as run.seed=1")
    train.add_argument("--dry-run", action="store_true", help="print the resolved plan and stop")
    existing = train.add_mutually_exclusive_group()
    existing.add_argument("--overwrite", action="store_true", help="replace the run that is in the folder")
    existing.add_argument("--resume", action="store_true", help="continue it from its last checkpoint")
    existing.add_argument(
        "--continue", dest="go_on", action="store_true", help="start it, resume it, or say that it is done"
    )
    train.set_defaults(command=_train)


def _add_resume(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    resume = commands.add_parser(
        "resume",
        help="continue a run from its last checkpoint",
        description="Continue a run with its own configuration. Some keys may change, such as run.iterations",
    )
    resume.add_argument("run", type=Path, help="the run's folder, e.g. runs/frozenlake")
    resume.add_argument(
        "overrides", nargs="*", default=[], metavar="KEY=VALUE", help="overrides such as run.iterations=100"
    )
    resume.set_defaults(command=_resume)


def _add_eval(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    evaluate = commands.add_parser(
        "eval",
        help="success rate of a run's last checkpoint on held-out tasks",
        description="Serve a run's last checkpoint and play its tasks' held-out instances.",
    )
    evaluate.add_argument("run", type=Path, help="the run's folder, e.g. runs/frozenlake")
    evaluate.add_argument(
        "overrides", nargs="*", default=[], metavar="KEY=VALUE", help="overrides such as eval.episodes=1000"
    )
    evaluate.set_defaults(command=_eval)


def _add_simulate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    simulate = commands.add_parser(
        "simulate",
        help="run a configuration on simulated devices, in virtual time",
        description="Run the control plane as it is against simulated devices. Overrides: simulate.model=qwen3-14b",
    )
    simulate.add_argument("config", type=Path, nargs="?", help="a YAML file, e.g. examples/simulate_small.yaml")
    simulate.add_argument(
        "overrides", nargs="*", default=[], metavar="KEY=VALUE", help="overrides such as buffer.alpha=2"
    )
    simulate.add_argument("--overwrite", action="store_true", help="replace the run that is in the folder")
    simulate.add_argument(
        "--calibrate", type=Path, metavar="RUN", help="fit the world to a real run, and simulate that"
    )
    simulate.set_defaults(command=_simulate)
    plan = commands.add_parser(
        "plan",
        help="the configuration that a set of devices should have",
        description="Search splits, affinity, alpha and redundancy; simulate the best and write a configuration.",
    )
    plan.add_argument("config", type=Path, help="a YAML file with a section `simulate`")
    plan.add_argument(
        "overrides", nargs="*", default=[], metavar="KEY=VALUE", help="overrides such as simulate.model=qwen3-14b"
    )
    devices = plan.add_mutually_exclusive_group(required=True)
    devices.add_argument("--gpus", help="devices by class, e.g. h800=96,h20=32")
    devices.add_argument(
        "--cost", type=float, help="a budget in H20 hours an hour, spent on the configuration's classes"
    )
    plan.add_argument("--classes", help="with --cost, the classes to choose among, e.g. H800,H20")
    plan.add_argument("--out", type=Path, default=Path("planned.yaml"), help="where to write the best configuration")
    plan.add_argument("--quick", action="store_true", help="fewer candidates, shorter simulations")
    plan.add_argument(
        "--processes",
        type=int,
        default=0,
        help="simulations at a time (default: as many as cores); each takes up to half a GiB for 3,000 devices",
    )
    plan.set_defaults(command=_plan)


def _add_serve_reward(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from rollart.cli.serve_reward import add_command

    add_command(commands)


def _train(arguments: argparse.Namespace) -> int:
    from rollart.cli.train import train

    return train(arguments)


def _resume(arguments: argparse.Namespace) -> int:
    from rollart.cli.train import resume

    return resume(arguments.run, arguments.overrides)


def _eval(arguments: argparse.Namespace) -> int:
    from rollart.cli.evaluate import evaluate

    return evaluate(arguments.run, arguments.overrides)


def _simulate(arguments: argparse.Namespace) -> int:
    from rollart.cli.simulate import run

    return run(arguments)


def _plan(arguments: argparse.Namespace) -> int:
    from rollart.cli.plan import run

    return run(arguments)


def _init(arguments: argparse.Namespace) -> int:
    from rollart.cli.init import init

    return init(arguments.config, arguments.env)


def _report(arguments: argparse.Namespace) -> int:
    from rollart.report import write_report

    for run in arguments.runs:
        if not (run / "config.yaml").is_file():
            within = sorted(str(held.parent) for held in run.glob("*/config.yaml"))
            hint = f"; did you mean {' '.join(within[:3])}?" if within else ""
            print(f"rollart: {run} holds no run (no config.yaml){hint}", file=sys.stderr)
            return 2
    if arguments.out is not None and arguments.out.is_dir():
        print(f"rollart: --out {arguments.out} is a folder; name a file in it", file=sys.stderr)
        return 2
    try:
        print(f"report: {write_report(arguments.runs, out=arguments.out)}")
    except OSError as error:
        print(f"rollart: cannot write the report to {arguments.out or arguments.runs[0]}: {error}", file=sys.stderr)
        return 2
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from rollart.doctor import examine

    table = Table("", "what", "found", "what to do", box=None, pad_edge=False)
    marks = {"ok": "[green]ok[/]", "limited": "[yellow]limited[/]", "missing": "[red]missing[/]"}
    findings = examine()
    for finding in findings:
        table.add_row(marks[finding.verdict], finding.name, finding.detail, finding.remedy)
    Console().print(table)
    return int(any(finding.verdict == "missing" for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
