"""What a report shows of one run, read from its folder.

Invariant: nothing is invented. A number that was not logged is None and its chart says so; the headline
numbers are those of the rows
(tests/rollart/report/test_rollart_report_data.py::test_headline_numbers_are_those_of_the_rows).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import yaml

from rollart.errors import RunMissing
from rollart.observe.errors import CorruptFile
from rollart.observe.metrics import LEDGER_COLUMNS, REQUIRED, Row, read_metrics, wall_seconds
from rollart.observe.runinfo import RunInfo, read_run
from rollart.observe.trace import read_trace
from rollart.report.timeline import Window, windows

FILES = ("metrics.jsonl", "trace.json", "config.yaml", "run.json")
# Everything else that was logged is shown too, as one small chart each.
_CHARTED = (*REQUIRED, "success/mean", "lag/mean", "lag/max")
_BY_TASK = ("eval/success/", "reward/mean/")
_CHARTED_UNDER = ("time/", "ledger/", "eval/", "staleness/hist/", "lag/hist/", "driver/", "push_bytes", *_BY_TASK)


class Column(msgspec.Struct):
    """One metric over all rows."""

    name: str
    values: list[int | float | None]


class Evaluation(msgspec.Struct):
    step: int
    time: float | None
    success: float


class Headline(msgspec.Struct):
    final_success: float | None = None
    best_success: float | None = None
    best_step: int | None = None
    wall_s: float | None = None
    tokens_per_s: float | None = None
    exposed_share: float | None = None  # of the iterations' wall time
    step_s: float | None = None
    driver_share: float | None = None  # CPU of the driver's own process, of the iterations' wall time


class RunData(msgspec.Struct, kw_only=True):
    label: str
    info: RunInfo
    iterations: int
    headline: Headline
    columns: list[Column]
    parts: list[Column]
    evaluations: list[Evaluation]
    tasks: list[str]  # of a mixture; none where there is one task
    staleness: list[tuple[int, int]]  # staleness, samples
    lag: list[tuple[int, int]]
    ledger: list[tuple[str, int]]
    signals: list[str]
    windows: list[Window]
    config: str
    missing: list[str]


class ReportData(msgspec.Struct):
    runs: list[RunData]
    differences: list[tuple[str, list[str]]]  # configuration key, its value in each run


def load_report(folders: Sequence[Path]) -> ReportData:
    runs = [load_run(folder) for folder in folders]
    if len({run.label for run in runs}) < len(runs):
        parent = os.path.commonpath([folder.resolve() for folder in folders])
        for run, folder in zip(runs, folders, strict=True):
            run.label = os.path.relpath(folder.resolve(), parent)
    return ReportData(runs, _differences(runs) if len(runs) > 1 else [])


def load_run(folder: Path) -> RunData:
    """Raises RunMissing when the folder holds none of a run's files, CorruptFile when one is damaged."""
    missing = [name for name in FILES if not (folder / name).is_file()]
    if len(missing) == len(FILES):
        raise RunMissing(f"{folder} holds no run: none of {', '.join(FILES)}")
    info = read_run(folder) or RunInfo(name=folder.resolve().name)
    rows = read_metrics(folder)
    columns = _columns(rows)
    parts = [_renamed(column, "time/") for column in columns if column.name.startswith("time/")]
    evaluations = _evaluations(rows)
    config = folder / "config.yaml"
    return RunData(
        label=info.name,
        info=info,
        iterations=len(rows),
        headline=_headline(rows, info, evaluations),
        columns=columns,
        parts=sorted(parts, key=lambda part: part.name == "other"),
        evaluations=evaluations,
        tasks=_tasks(columns),
        staleness=_histogram(columns, "staleness/hist/"),
        lag=_histogram(columns, "lag/hist/"),
        ledger=[(name, int(rows[-1].get(f"ledger/{name}") or 0)) for name in LEDGER_COLUMNS] if rows else [],
        signals=[c.name for c in columns if c.name not in _CHARTED and not c.name.startswith(_CHARTED_UNDER)],
        windows=windows(read_trace(folder / "trace.json")),
        config=config.read_text(encoding="utf-8", errors="replace") if config.is_file() else "",
        missing=missing,
    )


def _columns(rows: list[Row]) -> list[Column]:
    names = dict.fromkeys(key for row in rows for key in row)
    return [Column(name, [row.get(name) for row in rows]) for name in names]


def _tasks(columns: list[Column]) -> list[str]:
    return sorted({c.name.removeprefix(prefix) for prefix in _BY_TASK for c in columns if c.name.startswith(prefix)})


def _renamed(column: Column, prefix: str) -> Column:
    return Column(column.name.removeprefix(prefix), column.values)


def _evaluations(rows: list[Row]) -> list[Evaluation]:
    found = []
    if rows and (before := rows[0].get("eval/success_before")) is not None:
        began = (rows[0].get("time") or 0.0) - wall_seconds(rows[0])
        found.append(Evaluation(int(rows[0]["step"] or 1) - 1, max(began, 0.0), before))
    for row in rows:
        if (success := row.get("eval/success")) is not None:
            found.append(Evaluation(int(row["step"] or 0), row.get("time"), success))
    return found


def _headline(rows: list[Row], info: RunInfo, evaluations: list[Evaluation]) -> Headline:
    best = max(evaluations, key=lambda evaluation: evaluation.success, default=None)
    walls = [wall_seconds(row) for row in rows]
    total = sum(walls)
    tokens = sum((row.get("tokens_per_s") or 0.0) * wall for row, wall in zip(rows, walls, strict=True))
    exposed = sum(row.get("pull_exposed_s") or 0.0 for row in rows)
    return Headline(
        final_success=evaluations[-1].success if evaluations else None,
        best_success=best.success if best else None,
        best_step=best.step if best else None,
        wall_s=_run_time(rows, info),
        tokens_per_s=tokens / total if total else None,
        exposed_share=exposed / total if total else None,
        step_s=total / len(rows) if rows else None,
        driver_share=_driver_share(rows, total),
    )


def _driver_share(rows: list[Row], total: float) -> float | None:
    spent = [row.get("driver/cpu_s") for row in rows]
    known = [seconds for seconds in spent if seconds is not None]
    return sum(known) / total if total and len(known) == len(rows) else None


def _run_time(rows: list[Row], info: RunInfo) -> float | None:
    if info.wall_s is not None:
        return info.wall_s
    if info.started and info.ended:
        return (info.ended - info.started).total_seconds()
    return rows[-1].get("time") if rows else None


def _histogram(columns: list[Column], prefix: str) -> list[tuple[int, int]]:
    """Counts summed over the run. A key whose end is not an integer was not made by `histogram`."""
    counts = {
        int(column.name.removeprefix(prefix)): int(sum(value or 0 for value in column.values))
        for column in columns
        if column.name.startswith(prefix) and column.name.removeprefix(prefix).lstrip("-").isdecimal()
    }
    return sorted(counts.items())


def _differences(runs: list[RunData]) -> list[tuple[str, list[str]]]:
    """The configuration keys that are not equal in all runs."""
    flat = [_flatten("", _parsed(run)) for run in runs]
    keys = dict.fromkeys(key for one in flat for key in one)
    values = [(key, [one.get(key, "") for one in flat]) for key in keys]
    return [(key, texts) for key, texts in values if len(set(texts)) > 1]


def _parsed(run: RunData) -> object:
    try:
        return yaml.safe_load(run.config)
    except yaml.YAMLError as error:
        raise CorruptFile(f"config.yaml of {run.label} is not YAML ({error}); restore it") from error


def _flatten(prefix: str, value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        # YAML can spell lone surrogates, which no file can hold.
        return {prefix: str(value).encode(errors="replace").decode()} if prefix else {}
    return {
        key: text
        for name, inner in value.items()
        for key, text in _flatten(f"{prefix}.{name}" if prefix else str(name), inner).items()
    }
