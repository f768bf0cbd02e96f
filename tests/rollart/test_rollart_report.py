"""The report: its numbers against the rows, and the page in a real browser."""

from __future__ import annotations

import base64
import json
import math
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.sync.client import connect

from rollart.errors import RunMissing
from rollart.observe import (
    CorruptFile,
    MetricsWriter,
    RunInfo,
    StepClock,
    Trace,
    histogram,
    read_trace,
    write_run,
)
from rollart.report import write_report
from rollart.report.data import load_report, load_run
from rollart.report.timeline import MAX_LANES, windows

# --- Sample runs ---------------------------------------------------------------------------------

HOSTILE = "</script><script>throw 1</script><img src=x onerror=alert(1)> \u2028 $data ${1} \x07 'q\" 𝔘ni " + "w" * 80


class Sample:
    """Writes a run folder as a run does: a controller's steps, two engines, sixty environments, a weight path."""

    def __init__(self, folder: Path, *, name: str = "frozenlake", seed: int = 0, iterations: int = 120) -> None:
        self.folder, self.name, self.iterations = folder, name, iterations
        self.random = random.Random(seed)
        self.now = 50.0
        self.clock = StepClock(lambda: self.now)
        self.issued = self.delivered = 0
        self.info = RunInfo(
            name=name,
            seed=seed,
            iterations=iterations,
            alpha=1.0,
            parity_limit=1e-3,
            started=datetime(2030, 5, 4, 10, 30, tzinfo=UTC),
        )

    def write(self) -> Path:
        folder = self.folder
        folder.mkdir(parents=True, exist_ok=True)
        write_run(folder, self.info)
        text = f"run:\n  name: {json.dumps(self.name)}\n  seed: {self.info.seed}\ntrain:\n  lr: 0.001\n"
        (folder / "config.yaml").write_text(text)
        trace = Trace(folder / "trace.json", lambda: self.now)
        with MetricsWriter(folder, tensorboard=False) as metrics:
            for step in range(1, self.iterations + 1):
                metrics.write(self.iteration(step, trace))
        trace.close()
        if self.iterations:
            ended = self.info.started + timedelta(seconds=self.now - 50) if self.info.started else None
            done = msgspec.structs.replace(
                self.info, status="finished", ended=ended, wall_s=self.now - 50, peak_memory_bytes=5_368_709_120
            )
            write_run(folder, done)
        return folder

    def step(self, trace: Trace, part: str, mean: float, resource: str = "controller") -> float:
        """One part of the iteration, timed as the controller does; returns when it began."""
        began = self.now
        with self.clock.part(part), trace.measure(resource, part):
            self.now += mean * self.random.lognormvariate(0, 0.25)
        return began

    def iteration(self, step: int, trace: Trace) -> dict[str, Any]:
        skill = 1 / (1 + math.exp(-(step - 35) / 12)) * 0.8 + 0.02
        began = self.step(trace, "get_batch", 1.3)
        exposed = 0.0
        if step > 1:
            self.step(trace, "wait_weights", 0.004)
            suspended = self.step(trace, "suspend", 0.02)
            self.step(trace, "update", 0.05, "commit")
            self.step(trace, "resume", 0.008)
            exposed = self.now - suspended
            self.step(trace, "probe", 0.03)
        self.step(trace, "train", 0.9, "train")
        self.now += 0.01
        if step % 10 == 0:
            self.step(trace, "eval", 0.8)
        self.rollout(trace, began, self.now)
        push = 0.06 * self.random.lognormvariate(0, 0.3)
        trace.span("push", f"push {step}", self.now - 0.01, self.now + push, bytes=661_000)
        trace.span("pull", f"pull {step}", self.now + push, self.now + 3 * push, worker="gen-0")
        trace.mark("train", "weights changed")
        lap = self.clock.lap()
        trace.flush(step, lap.start, lap.end)
        staleness = [self.random.choice([0, 0, 1]) if step > 1 else 0 for _ in range(128)]
        self.delivered += 128
        self.issued = self.delivered + 3 * step + 190
        row = {
            "step": step,
            "version": step - 1,
            "time": self.now - 50,
            "reward/mean": skill + self.random.gauss(0, 0.03),
            "success/mean": min(1, max(0, skill + self.random.gauss(0, 0.05))),
            "parity/max_abs": 10 ** self.random.uniform(-6.5, -5),
            "off_policy/in_flight": self.random.randint(20, 60),
            "off_policy/in_queue": self.random.randint(0, 40),
            "tokens_per_s": self.random.gauss(1500, 90),
            "push_s": push,
            "pull_accumulated_s": 2 * push,
            "pull_exposed_s": exposed,
            "policy/entropy": 1.3 - skill + self.random.gauss(0, 0.02),
            "policy/loss": self.random.gauss(0, 0.02),
            "policy/grad_norm": math.nan if step == 5 else self.random.lognormvariate(0, 0.4),
            "learning_rate": 1e-3 * (1 - step / 130),
            "ledger/issued": self.issued,
            "ledger/running": 150,
            "ledger/buffered": 40,
            "ledger/delivered": self.delivered,
            "ledger/surplus": step,
            "ledger/stale": step,
            "ledger/filtered": step,
            "ledger/failed": 0,
            "ledger/cancelled": 0,
        }
        if step == 1:
            row["eval/success_before"] = 0.031
        if step % 10 == 0:
            row["eval/success"] = min(1.0, skill + self.random.gauss(0, 0.02))
        return row | lap.metrics() | histogram("staleness", staleness) | histogram("lag", [s + 1 for s in staleness])

    def rollout(self, trace: Trace, start: float, end: float) -> None:
        for worker in range(2):
            at = start
            while at < end:
                length = self.random.uniform(0.08, 0.3)
                trace.span(f"gen-{worker}", "engine busy", at, min(at + length, end), requests=64)
                at += length + self.random.expovariate(30)
        for _ in range(150):
            at = self.random.uniform(start, end)
            trace.span("env", "episode", at, at + self.random.uniform(0.2, 1.2))
        for _ in range(40):
            at = self.random.uniform(start, end)
            trace.span("reward", "reward", at, at + 0.012)


def bare(folder: Path) -> Path:
    """A run that has just begun: nothing but its description."""
    write_run(folder, RunInfo(name="just begun", iterations=120))
    return folder


def hostile(folder: Path) -> Path:
    """A run whose every name tries to break out of the page."""
    sample = Sample(folder, name=HOSTILE, iterations=1)
    sample.write()
    write_run(folder, msgspec.structs.replace(sample.info, status="failed", reason=f"worker {HOSTILE} died"))
    with closing(Trace(folder / "trace.json", lambda: sample.now)) as trace:
        row = sample.iteration(2, trace)
        for resource in ("gen-0", "controller", HOSTILE, "__proto__"):
            trace.span(resource, HOSTILE, sample.now + 0.1, sample.now + 0.5, **{HOSTILE: HOSTILE})
        trace.flush(3, sample.now, sample.now + 1)
    row |= {f"time/{HOSTILE}": 0.5, "time/__proto__": 0.5, HOSTILE: 1.0, "constructor": 2.0, "staleness/hist/x": 1}
    with MetricsWriter(folder, resume_step=1, tensorboard=False) as metrics:
        metrics.write(row)
    return folder


# --- Data ----------------------------------------------------------------------------------------


def test_headline_numbers_are_those_of_the_rows(tmp_path: Path):
    run = load_run(Sample(tmp_path / "a", iterations=25).write())
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


def test_a_folder_without_a_run_is_refused(tmp_path: Path):
    with pytest.raises(RunMissing, match="holds no run"):
        write_report(tmp_path)
    with pytest.raises(ValueError, match="at least one"):
        write_report([])
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_named_and_the_old_report_stays(tmp_path: Path):
    folder = Sample(tmp_path / "a", iterations=1).write()
    before = write_report(folder).read_bytes()
    (folder / "metrics.jsonl").write_text("nonsense\n")
    with pytest.raises(CorruptFile, match=r"metrics\.jsonl:1"):
        write_report(folder)
    assert (folder / "report.html").read_bytes() == before


def test_several_runs_show_what_differs_in_their_configuration(tmp_path: Path):
    folders = [Sample(tmp_path / f"s{seed}", seed=seed, iterations=1).write() for seed in (1, 2)]
    report = load_report(folders)
    assert [run.label for run in report.runs] == ["s1", "s2"]
    assert report.differences == [("run.seed", ["1", "2"])]
    assert write_report(folders) == tmp_path / "comparison.html"
    assert write_report(folders, tmp_path / "new" / "x.html") == tmp_path / "new" / "x.html"
    (folders[1] / "config.yaml").write_text("a: [")
    with pytest.raises(CorruptFile, match="s2"):
        load_report(folders)


def test_the_iterations_shown_are_a_typical_the_slowest_and_the_last(tmp_path: Path):
    folder = Sample(tmp_path / "a", iterations=30).write()
    shown = windows(read_trace(folder / "trace.json"))
    assert [window.why for window in shown] == ["typical", "slowest", "last"]
    assert shown[2].step == 30
    typical = shown[0]
    assert [row.resource for row in typical.rows][:5] == ["controller", "gen-0", "gen-1", "env", "reward"]
    [(start, end)] = typical.suspended
    assert 0 < start < end < typical.length
    busy = {row.resource: row.busy for row in typical.rows}
    assert 0.5 < busy["gen-0"] < 1 and busy["train"] < 0.7


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0.001, 2)), max_size=60), st.integers(1, 200))
def test_no_span_of_a_window_is_lost(tmp_path_factory, spans, copies):
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


def test_the_page_asks_for_nothing(tmp_path: Path):
    page = write_report(Sample(tmp_path / "a", iterations=2).write()).read_text()
    assert "default-src 'none'" in page
    assert not re.search(r"<link(?! rel=\"icon\" href=\"data:,\")|<script[^>]+src|@import|url\(|@font-face", page)
    assert re.findall(r"https?://[^\"'\s]+", page) == ["http://www.w3.org/2000/svg"]


def test_nothing_of_a_run_can_close_the_script(tmp_path: Path):
    page = write_report(hostile(tmp_path / "a")).read_text()
    assert page.count("</script>") == page.count("<script") == 2
    text = page.split('type="application/json">')[1].split("</script>")[0]
    assert json.loads(text)["runs"][0]["label"] == HOSTILE


# --- In a browser --------------------------------------------------------------------------------

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """Headless Chromium, driven over the DevTools protocol."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM
        flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
        flags += " --disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars"
        self.process = subprocess.Popen(
            [CHROMIUM, *flags.split(), f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stderr
        lines = (re.search(rb"DevTools listening on (ws://\S+)", line) for line in self.process.stderr)
        found = next(filter(None, lines), None)
        assert found, "Chromium ended without opening its DevTools socket"
        self.resources = ExitStack()
        socket = connect(found[1].decode(), max_size=None, compression=None)
        self.socket = self.resources.enter_context(socket)
        self.calls = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        self.calls += 1
        message = {"id": self.calls, "method": method, "params": params}
        self.socket.send(json.dumps(message | ({"sessionId": session} if session else {})))
        while True:
            answer = json.loads(self.socket.recv(timeout=30))
            if answer.get("id") == self.calls:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def wait(self, method: str) -> None:
        while not any(event.get("method") == method for event in self.events):
            self.events.append(json.loads(self.socket.recv(timeout=30)))

    def open(self, page: Path, *, width: int = 1200, height: int = 900, dark: bool = False) -> Page:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call(
            "Emulation.setDeviceMetricsOverride",
            session,
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.call("Emulation.setTouchEmulationEnabled", session, enabled=width < 600)
        self.call("Emulation.setEmulatedMedia", session, features=[scheme])
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable", session)
        self.events.clear()
        self.call("Page.navigate", session, url=page.resolve().as_uri())
        self.wait("Page.loadEventFired")
        shown = Page(self, session, target, width)
        shown.settle()
        return shown

    def close(self) -> None:
        with suppress(Exception):
            self.call("Browser.close")
        self.resources.close()
        self.process.wait(timeout=20)
        assert self.process.stderr
        self.process.stderr.close()


class Page:
    """One page of the browser."""

    def __init__(self, browser: Browser, session: str, target: str, width: int) -> None:
        self.browser, self.session, self.target, self.width = browser, session, target, width

    def run(self, expression: str) -> Any:
        answer = self.browser.call(
            "Runtime.evaluate", self.session, expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def settle(self) -> None:
        """Plots draw in the frame after they are laid out."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done))))")

    def box(self, selector: str) -> tuple[float, float, float, float]:
        """Where an element is in the window, scrolled into it."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{found}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        self.settle()
        x, y, width, height = self.run(
            f"(({{x, y, width, height}}) => [x, y, width, height])({found}.getBoundingClientRect())"
        )
        return x, y, width, height

    def move(self, x: float, y: float) -> None:
        self.browser.call("Input.dispatchMouseEvent", self.session, type="mouseMoved", x=x, y=y)

    def tap(self, x: float, y: float) -> None:
        self.browser.call("Input.dispatchTouchEvent", self.session, type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.browser.call("Input.dispatchTouchEvent", self.session, type="touchEnd", touchPoints=[])
        self.settle()

    def press(self, label: str) -> None:
        self.run(f"[...document.querySelectorAll('button')].find(b => b.textContent === {json.dumps(label)}).click()")
        self.settle()

    def tip(self) -> str:
        assert not self.run("document.querySelector('.tip').hidden")
        return self.run("document.querySelector('.tip').innerText")

    def screenshot(self, path: Path) -> None:
        size = self.browser.call("Page.getLayoutMetrics", self.session)["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.browser.call("Page.captureScreenshot", self.session, captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    def check(self) -> None:
        """No error or request, no sideways scrolling, no text outside its plot."""
        bad = {"Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"}
        assert [event for event in self.browser.events if event["method"] in bad] == []
        asked = [e["params"]["request"]["url"] for e in self.browser.events if "request" in e.get("params", {})]
        assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
        assert self.run("document.documentElement.scrollWidth") <= self.width
        outside = self.run("""[...document.querySelectorAll("svg text")].filter(text => {
            const [inner, outer] = [text.getBoundingClientRect(), text.closest("svg").getBoundingClientRect()];
            return inner.width && (inner.left < outer.left - 2 || inner.right > outer.right + 2);
        }).map(text => text.textContent)""")
        assert outside == []

    def close(self) -> None:
        self.browser.call("Target.closeTarget", targetId=self.target)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium (chromium, chromium-browser, google-chrome) on the PATH")
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(Sample(tmp_path_factory.mktemp("runs") / "long").write())


MAKERS = {
    "bare": bare,
    "one": lambda folder: Sample(folder, iterations=1).write(),
    "two": lambda folder: Sample(folder, iterations=2).write(),
    "hostile": hostile,
}


@pytest.mark.real
@pytest.mark.parametrize("width", [375, 1200])
@pytest.mark.parametrize("kind", ["bare", "one", "two", "hostile", "long", "compared"])
def test_every_report_fits_and_runs_without_errors(
    browser: Browser, long_run: Path, tmp_path: Path, kind: str, width: int
):
    if kind == "long":
        report = long_run
    elif kind == "compared":
        report = write_report([make(tmp_path / name) for name, make in MAKERS.items()], tmp_path / "all.html")
    else:
        report = write_report(MAKERS[kind](tmp_path / kind))
    page = browser.open(report, width=width)
    page.check()
    page.run("document.querySelectorAll('button').forEach(button => button.click())")
    page.run("document.querySelectorAll('details').forEach(details => details.open = true)")
    page.settle()
    page.check()
    page.close()


@pytest.mark.real
@pytest.mark.parametrize("width", [375, 1200])
def test_every_plot_is_drawn(browser: Browser, long_run: Path, width: int):
    page = browser.open(long_run, width=width)
    plots = page.run("""[...document.querySelectorAll(".plot svg")].map(svg => ({
        label: svg.getAttribute("aria-label"),
        width: svg.getBoundingClientRect().width,
        drawn: [...svg.querySelectorAll("path.curve, path.span, rect[fill]:not([fill=transparent])")]
            .map(mark => mark.getBBox()).filter(box => box.width > 0 && box.height >= 0).length,
        extent: Math.max(0, ...[...svg.querySelectorAll("path.curve")].map(mark => mark.getBBox().width)),
        broken: /NaN|Infinity|undefined/.test(svg.outerHTML),
    }))""")
    labels = {plot["label"]: plot for plot in plots}
    assert len(plots) == len(labels) == 14
    for plot in plots:
        assert plot["width"] > 200 and plot["drawn"] >= 1 and not plot["broken"], plot
    for curve in ("Success rate", "Reward", "Weight transfer", "Engine against trainer", "policy/entropy"):
        assert labels[curve]["extent"] > 0.7 * labels[curve]["width"]
    assert labels["Step time by part"]["drawn"] > 300 if width > 600 else 150
    page.close()


@pytest.mark.real
def test_pointing_at_a_curve_and_a_span_tells_what_it_is(browser: Browser, long_run: Path):
    page = browser.open(long_run)
    x, y, width, height = page.box("svg[aria-label='Success rate']")
    page.move(x + width - 11, y + height / 2)
    assert "iteration 120" in page.tip() and "held-out tasks: 0.8" in page.tip()
    x, y, width, height = page.box("svg[aria-label='Step time by part']")
    page.move(x + width / 2, y + height / 2)
    head, *parts = page.tip().split("\n")
    total = float(head.split(": ")[1].removesuffix(" s"))
    assert sum(in_seconds(part.split(": ")[1]) for part in parts) == pytest.approx(total, rel=0.02)
    x, y, width, height = page.box("svg[aria-label^='What each resource did'] rect.span[fill='var(--orange)']")
    page.move(x + width / 2, y + height / 2)
    assert page.tip().startswith("train\ntrain, from ")
    page.move(5, 5)
    assert page.run("document.querySelector('.tip').hidden")
    page.check()
    page.close()


@pytest.mark.real
def test_a_tap_shows_details_until_the_next_one(browser: Browser, long_run: Path):
    page = browser.open(long_run, width=375)
    x, y, width, height = page.box("svg[aria-label^='What each resource did'] rect.span[fill='var(--blue)']")
    page.tap(x + min(width / 2, 5), y + height / 2)
    assert "get_batch" in page.tip()
    x, y, *_ = page.box("h2")
    page.tap(x + 5, y + 5)
    assert page.run("document.querySelector('.tip').hidden")
    page.close()


@pytest.mark.real
def test_choices_redraw(browser: Browser, long_run: Path):
    page = browser.open(long_run)
    axis = "document.querySelector('svg[aria-label=Reward]').textContent"
    assert "iteration" in page.run(axis)
    page.press("By run time")
    assert "run time" in page.run(axis) and "5 min" in page.run(axis)
    page.press("last: 120")
    assert page.run("!!document.querySelector('svg[aria-label=\"What each resource did in iteration 120\"]')")
    page.close()


@pytest.mark.real
def test_hostile_names_are_shown_as_text(browser: Browser, tmp_path: Path):
    page = browser.open(write_report(hostile(tmp_path / "a")))
    assert page.run("document.querySelector('h1').textContent") == HOSTILE
    assert page.run("document.title").startswith("</script><script>throw 1</script><img src=x onerror=")
    assert page.run("document.querySelectorAll('img, iframe, object, embed').length") == 0
    assert page.run("document.scripts.length") == 2
    legends = page.run("[...document.querySelectorAll('.legend')].map(legend => legend.textContent)")
    assert any(HOSTILE in text and "__proto__" in text for text in legends)
    page.close()


@pytest.mark.real
def test_an_empty_run_says_what_is_missing(browser: Browser, tmp_path: Path):
    page = browser.open(write_report(bare(tmp_path / "a")))
    text = page.run("document.body.innerText")
    for said in ("metrics.jsonl, trace.json, config.yaml", "No evaluation yet", "No timeline", "No iteration has"):
        assert said in text
    page.close()


@pytest.mark.real
def test_dark_and_light_follow_the_reader(browser: Browser, long_run: Path):
    brightness = []
    for dark in (False, True):
        page = browser.open(long_run, dark=dark)
        colours = page.run(
            """[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"""
        )
        brightness.append([sum(int(part) for part in re.findall(r"\d+", colour)[:3]) / 765 for colour in colours])
        page.close()
    (light_page, light_ink), (dark_page, dark_ink) = brightness
    assert light_page - light_ink > 0.7 and dark_ink - dark_page > 0.7


def in_seconds(text: str) -> float:
    number, unit = text.split()
    return float(number) / (1000 if unit == "ms" else 1)
