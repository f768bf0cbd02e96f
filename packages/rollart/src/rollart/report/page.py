"""One self-contained HTML file for one run, or for several laid over each other.

Invariants (tests/rollart/report/):
- The file loads nothing (`test_the_page_asks_for_nothing`): style, script and data are inlined, and a
  content security policy forbids the rest.
- Nothing in a run folder is markup or code (`test_hostile_names_are_shown_as_text`): it travels as JSON in
  which `<` cannot occur, and the script writes it as text nodes only.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from string import Template

import msgspec

from rollart.observe.files import replace_file
from rollart.report.data import ReportData, load_report

_ASSETS = files("rollart.report") / "assets"
_SCRIPTS = ("dom.js", "charts.js", "timeline.js", "sections.js", "report.js")


def write_report(run_folder: Path | str | Sequence[Path | str], out: Path | str | None = None) -> Path:
    """Write the report of one run folder, or the comparison of several, and return where it is.

    By default that is `report.html` in the run's folder, or `comparison.html` beside the first of several.
    """
    folders = [Path(folder) for folder in ([run_folder] if isinstance(run_folder, Path | str) else run_folder)]
    if not folders:
        raise ValueError("run_folder is empty; name at least one run folder")
    default = folders[0].parent / "comparison.html" if len(folders) > 1 else folders[0] / "report.html"
    target = Path(out) if out is not None else default
    target.parent.mkdir(parents=True, exist_ok=True)
    replace_file(target, render(load_report(folders)).encode())
    return target


def render(data: ReportData) -> str:
    """The page of this data."""
    title = " · ".join(run.label for run in data.runs)
    return Template(_asset("page.html")).substitute(
        title=html.escape(title),
        style=_asset("report.css"),
        script="\n".join(_asset(name) for name in _SCRIPTS),
        # Escaped, "<" can neither end the script element nor open a comment in it.
        data=msgspec.json.encode(data).decode().replace("<", "\\u003c"),
    )


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")
