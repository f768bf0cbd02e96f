"""The report's numbers and timeline, against the rows and the spans."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.errors import RunMissing
from rollart.observe import CorruptFile, Trace, read_trace
from rollart.report import write_report
from rollart.report.data import load_report, load_run
from rollart.report.timeline import MAX_LANES, windows


def test_headline_numbers_are_those_of_the_rows(tmp_path: Path, samples: Any):
    run = load_run(samples.run(tmp_path / "a", iterations=25))
    columns = {column.name: column.values for column in run.columns}
    walls = [sum(part.values[i] or 0 for part in run.parts) for i in range(25)]
    assert sum(walls) == pytest.approx(run.headline.wall_s, abs=1e-6)
    assert run.parts[-1].name == "other"
    assert [(e.step, e.success) for e in run.evaluations] == [
        (0, 0.031),
        (10, columns["eval/success"][9]),
        (20, columns["eval/success"][19]),
    ]
    assert run.headline.final_success == columns["eval/success"][19]
    assert run.headline.best_success == max(e.success for e in run.evaluations)
    tokens = sum((t or 0) * w for t, w in zip(columns["tokens_per_s"], walls, strict=True))
    assert run.headline.tokens_per_s == pytest.approx(tokens / sum(walls))
    assert sum(n for _, n in run.staleness) == sum(n for _, n in run.lag) == 25 * 128
    ledger = dict(run.ledger)
    assert ledger.pop("issued") == sum(ledger.values())


def test_tasks_of_a_mixture_are_found_and_not_shown_twice(tmp_path: Path, samples: Any):
    run = load_run(samples.mixture(tmp_path / "a"))
    assert run.tasks == sorted(["math", "shop", samples.HOSTILE])
    assert not [name for name in run.signals if name.startswith(("reward/", "eval/", "push_bytes", "driver/"))]
    assert run.headline.driver_share == pytest.approx(
        0.3 * 40 / sum(value or 0.0 for part in run.parts for value in part.values)
    )
    assert load_run(samples.one(tmp_path / "b")).tasks == []


def test_a_folder_without_a_run_is_refused(tmp_path: Path):
    with pytest.raises(RunMissing, match="holds no run"):
        write_report(tmp_path)
    with pytest.raises(ValueError, match="at least one"):
        write_report([])
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_named_and_the_old_report_stays(tmp_path: Path, samples: Any):
    folder = samples.run(tmp_path / "a", iterations=1)
    before = write_report(folder).read_bytes()
    (folder / "metrics.jsonl").write_text("nonsense\n")
    with pytest.raises(CorruptFile, match=r"metrics\.jsonl:1"):
        write_report(folder)
    assert (folder / "report.html").read_bytes() == before


def test_several_runs_show_what_differs_in_their_configuration(tmp_path: Path, samples: Any):
    folders = [samples.run(tmp_path / f"s{seed}", seed=seed, iterations=1) for seed in (1, 2)]
    report = load_report(folders)
    assert [run.label for run in report.runs] == ["s1", "s2"]
    assert report.differences == [("run.seed", ["1", "2"])]
    assert write_report(folders) == tmp_path / "comparison.html"
    assert write_report(folders, tmp_path / "new" / "x.html") == tmp_path / "new" / "x.html"
    (folders[1] / "config.yaml").write_text("a: [")
    with pytest.raises(CorruptFile, match="s2"):
        load_report(folders)


def test_the_iterations_shown_are_a_typical_the_slowest_and_the_last(tmp_path: Path, samples: Any):
    folder = samples.run(tmp_path / "a", iterations=30)
    shown = windows(read_trace(folder / "trace.json"))
    assert [window.why for window in shown] == ["typical", "slowest", "last"]
    assert shown[2].step == 30
    typical = shown[0]
    assert [row.resource for row in typical.rows][:5] == ["controller", "gen-0", "gen-1", "env", "reward"]
    [(start, end)] = typical.suspended
    assert 0 < start < end < typical.length
    busy = {row.resource: row.busy for row in typical.rows}
    assert 0.5 < busy["gen-0"] < 1 and busy["train"] < 0.7


@settings(max_examples=40)
@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0.001, 2)), max_size=60))
def test_no_span_of_a_window_is_lost(tmp_path_factory, spans):
    path = tmp_path_factory.mktemp("run") / "trace.json"
    trace = Trace(path, lambda: 0.0, limit=100_000)
    for start, length in spans:
        trace.span("env", "episode", start, start + length)
    trace.flush(1, 1.0, 2.0)
    trace.close()
    events = read_trace(path)
    inside = [
        (e.ts, e.ts + (e.dur or 0))
        for e in events
        if e.name == "episode" and e.ts is not None and e.ts < 2_000_000 and e.ts + (e.dur or 0) > 1_000_000
    ]
    [window] = windows(events)
    row = next((row for row in window.rows if row.resource == "env"), None)
    if row is None:
        assert not spans
    elif row.level:
        most = max(sum(a <= at < b for a, b in inside) for at, _ in [*inside, (1_000_000, 0)])
        assert max(n for _, n in row.level) == most > MAX_LANES
    else:
        assert len(row.bars) == len(inside)
        assert row.lanes <= MAX_LANES


def test_a_crowded_row_keeps_its_peaks(tmp_path: Path):
    path = tmp_path / "trace.json"
    trace = Trace(path, lambda: 0.0, limit=100_000)
    for i in range(2000):
        trace.span("env", "episode", i / 1000, i / 1000 + 0.05)
    for _ in range(77):
        trace.span("env", "episode", 1.5, 1.5001)
    trace.flush(1, 0.0, 2.0)
    trace.close()
    [row] = [row for row in windows(read_trace(path))[0].rows if row.resource == "env"]
    assert not row.bars and len(row.level) <= 300
    at, most = max(row.level, key=lambda entry: entry[1])
    assert at == pytest.approx(1.5, abs=0.01) and most == 127
    assert row.busy == pytest.approx(1.0, abs=0.001)


def test_the_page_asks_for_nothing(tmp_path: Path, samples: Any):
    page = write_report(samples.run(tmp_path / "a", iterations=2)).read_text()
    assert "default-src 'none'" in page
    assert not re.search(r"<link(?! rel=\"icon\" href=\"data:,\")|<script[^>]+src|@import|url\(|@font-face", page)
    assert re.findall(r"https?://[^\"'\s]+", page) == ["http://www.w3.org/2000/svg"]


def test_nothing_of_a_run_can_close_the_script(tmp_path: Path, samples: Any):
    page = write_report(samples.hostile(tmp_path / "a")).read_text()
    assert page.count("</script>") == page.count("<script") == 2
    text = page.split('type="application/json">')[1].split("</script>")[0]
    assert json.loads(text)["runs"][0]["label"] == samples.HOSTILE
