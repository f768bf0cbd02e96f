"""The page in a real browser: errors, requests, drawing, widths, pointing, hostile names."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

from rollart.report import write_report

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
def long_run(tmp_path_factory: pytest.TempPathFactory, samples: Any) -> Path:
    return write_report(samples.run(tmp_path_factory.mktemp("runs") / "long"))


@pytest.mark.real
@pytest.mark.parametrize("width", [375, 1200])
@pytest.mark.parametrize("kind", ["bare", "one", "two", "mixture", "hostile", "long", "compared"])
def test_every_report_fits_and_runs_without_errors(
    browser: Browser, long_run: Path, tmp_path: Path, samples: Any, kind: str, width: int
):
    if kind == "long":
        report = long_run
    elif kind == "compared":
        folders = [getattr(samples, name)(tmp_path / name) for name in ("bare", "one", "mixture", "hostile")]
        report = write_report(folders, tmp_path / "all.html")
    else:
        report = write_report(getattr(samples, kind)(tmp_path / kind))
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
def test_a_mixture_is_told_task_by_task(browser: Browser, tmp_path: Path, samples: Any):
    page = browser.open(write_report(samples.mixture(tmp_path / "a")))
    text = page.run("document.body.innerText")
    assert "Task by task" in text and "from 2 ranks, at most 50 % from one" in text
    plots = page.run("[...document.querySelectorAll('.plot svg')].map(svg => svg.getAttribute('aria-label'))")
    assert {"Success rate by task", "Reward by task"} <= set(plots)
    page.close()


@pytest.mark.real
def test_several_runs_of_a_mixture_are_compared_task_by_task(browser: Browser, tmp_path: Path, samples: Any):
    folders = [samples.mixture(tmp_path / name, name=name, seed=n) for n, name in enumerate(("first", "second"))]
    page = browser.open(write_report([*folders, samples.two(tmp_path / "lake")], tmp_path / "all.html"))
    plots = page.run("[...document.querySelectorAll('.plot svg')].map(svg => svg.getAttribute('aria-label'))")
    assert {"math", "shop", samples.HOSTILE} <= set(plots)
    text = page.run("document.body.innerText")
    assert "3 runs compared" in text and "first: success" in text and "The weights' way" in text
    page.check()
    page.close()


@pytest.mark.real
def test_hostile_names_are_shown_as_text(browser: Browser, tmp_path: Path, samples: Any):
    page = browser.open(write_report(samples.hostile(tmp_path / "a")))
    assert page.run("document.querySelector('h1').textContent") == samples.HOSTILE
    assert page.run("document.title").startswith("</script><script>throw 1</script><img src=x onerror=")
    assert page.run("document.querySelectorAll('img, iframe, object, embed').length") == 0
    assert page.run("document.scripts.length") == 2
    legends = page.run("[...document.querySelectorAll('.legend')].map(legend => legend.textContent)")
    assert any(samples.HOSTILE in text and "__proto__" in text for text in legends)
    page.close()


@pytest.mark.real
def test_an_empty_run_says_what_is_missing(browser: Browser, tmp_path: Path, samples: Any):
    page = browser.open(write_report(samples.bare(tmp_path / "a")))
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
