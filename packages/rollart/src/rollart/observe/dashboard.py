"""Live progress of a run: a panel that redraws in place on a terminal, one line per iteration elsewhere.

Invariant: it never ends the run
(tests/rollart/test_rollart_dashboard.py::test_a_broken_console_never_ends_the_run).
Whatever rendering raises (a closed pipe, a console that cannot encode a block character) turns the
dashboard off after one logged warning. It draws only in `update` and `log`, in the caller's thread, so
nothing flickers or interleaves.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_log = logging.getLogger(__name__)

_PART_COLOURS = ("blue", "yellow", "green", "magenta", "cyan", "red", "bright_blue", "bright_yellow")
_HISTORY = 48  # evaluations kept for the sparkline
_SPARKS = "▁▂▃▄▅▆▇█"


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to show. A number that is not known yet is None."""

    run: str
    step: int = 0  # finished iterations
    steps: int | None = None  # iterations asked for
    phase: str = ""  # what the controller is doing now
    elapsed: float = 0.0
    eta: float | None = None
    reward: float | None = None
    success: float | None = None  # the latest evaluation
    staleness_mean: float | None = None
    staleness_max: float | None = None
    bound: int | None = None
    tokens_per_s: float | None = None
    parts: dict[str, float] = {}  # seconds of the last iteration by part
    push: float | None = None
    pull_accumulated: float | None = None
    pull_exposed: float | None = None
    parity: float | None = None
    ledger: dict[str, int] = {}


def snapshot(
    row: Mapping[str, int | float | None],
    *,
    run: str,
    steps: int | None = None,
    bound: int | None = None,
    success: float | None = None,
    phase: str = "",
) -> Snapshot:
    """The snapshot of a row of metrics. `success` is the last known one, for rows without an evaluation."""
    step, elapsed = int(row["step"] or 0), float(row["time"] or 0.0)
    success = row.get("eval/success", success)
    return Snapshot(
        run=run,
        step=step,
        steps=steps,
        phase=phase,
        elapsed=elapsed,
        eta=elapsed / step * (steps - step) if steps and step else None,
        reward=row["reward/mean"],
        success=success,
        staleness_mean=row["staleness/mean"],
        staleness_max=row["staleness/max"],
        bound=bound,
        tokens_per_s=row["tokens_per_s"],
        parts=_under(row, "time/"),
        push=row["push_s"],
        pull_accumulated=row["pull_accumulated_s"],
        pull_exposed=row["pull_exposed_s"],
        parity=row["parity/max_abs"],
        ledger={column: int(count) for column, count in _under(row, "ledger/").items()},
    )


class Dashboard:
    """Shows snapshots. `plain` chooses lines over the panel; by default it follows the console."""

    def __init__(self, console: Console | None = None, *, plain: bool | None = None) -> None:
        self._console = console or Console()
        self._plain = plain if plain is not None else not self._console.is_terminal
        self._live: Live | None = None
        self._on = True
        self._printed = 0
        self._success: deque[float] = deque(maxlen=_HISTORY)
        self._counted: tuple[int, float] | None = None

    def __enter__(self) -> Dashboard:
        if not self._plain:
            self._safely(self._start)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._safely(self._live.stop)

    def update(self, snapshot: Snapshot) -> None:
        self._remember(snapshot)
        self._safely(lambda: self._line(snapshot) if self._live is None else self._draw(self._live, snapshot))

    def log(self, message: str) -> None:
        """A line that stays: above the panel, or in the log."""
        self._safely(lambda: self._console.print(Text(message)))

    def _start(self) -> None:
        self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._live.start()

    def _draw(self, live: Live, snapshot: Snapshot) -> None:
        live.update(panel(snapshot, list(self._success), self._console.width), refresh=True)

    def _line(self, snapshot: Snapshot) -> None:
        if snapshot.step > self._printed:
            self._printed = snapshot.step
            self._console.print(Text(line(snapshot)), soft_wrap=True)

    def _remember(self, snapshot: Snapshot) -> None:
        if snapshot.success is not None and self._counted != (snapshot.step, snapshot.success):
            self._counted = (snapshot.step, snapshot.success)
            self._success.append(snapshot.success)

    def _safely(self, act: Callable[[], None]) -> None:
        if not self._on:
            return
        try:
            act()
        except (Exception, SystemExit):  # rich leaves by SystemExit when its pipe is closed
            self._on = False
            if self._live is not None:
                with suppress(Exception, SystemExit):  # the console is broken; what matters is to let go of it
                    self._live.stop()
            _log.warning("the dashboard is off; the run goes on", exc_info=True)


def line(s: Snapshot) -> str:
    """One iteration in one line."""
    total = sum(s.parts.values())
    shares = ", ".join(
        f"{name} {seconds / total:.0%}" for name, seconds in s.parts.items() if total and seconds / total >= 0.01
    )
    words = [
        f"[{s.step}/{s.steps or '?'}]",
        f"reward {_fixed(s.reward)}",
        f"success {_fixed(s.success)}",
        f"staleness {_fixed(s.staleness_mean, 2)} max {_fixed(s.staleness_max, 0)}",
        f"{_fixed(s.tokens_per_s, 0)} tokens/s",
        f"step {total:.2f} s ({shares})",
        f"exposed pull {_fixed(s.pull_exposed)} s",
        f"parity {_power(s.parity)}",
        f"elapsed {_clock(s.elapsed)}",
        f"ETA {_clock(s.eta)}",
    ]
    return "  ".join(words)


def panel(s: Snapshot, success: list[float], width: int) -> RenderableType:
    """The whole dashboard for one snapshot."""
    width = min(width, 110)
    inside = width - 4
    parts = (_progress(s, inside), Text(""), _numbers(s, success), Text(""), _step_time(s, inside), _ledger(s))
    return Panel(
        Group(*parts),
        title=Text(f" {s.run} ", style="bold"),
        title_align="left",
        border_style="dim",
        width=width,
    )


def _progress(s: Snapshot, width: int) -> Group:
    words = Text(f"iteration {s.step}/{s.steps or '?'}", style="bold")
    words.append(f"   {_clock(s.elapsed)} elapsed   {_clock(s.eta)} to go", style="not bold")
    words.append(f"   {s.phase}", style="not bold dim")
    return Group(words, ProgressBar(total=s.steps or 1, completed=s.step if s.steps else 0, width=width))


def _numbers(s: Snapshot, success: list[float]) -> Table:
    grid = Table.grid(padding=(0, 2))
    bound = "" if s.bound is None else f", bound {s.bound}"
    best = f"best {max(success):.3f}  {_sparkline(success)}" if success else "no evaluation yet"
    rows = (
        ("success", _fixed(s.success), best),
        ("reward", _fixed(s.reward), "mean of the last batch"),
        ("staleness", _fixed(s.staleness_mean, 2), f"max {_fixed(s.staleness_max, 0)}{bound}"),
        ("tokens/s", _fixed(s.tokens_per_s, 0), "generated"),
        ("parity", _power(s.parity), "largest difference of log-probabilities, engine to trainer"),
        (
            "exposed pull",
            f"{_fixed(s.pull_exposed)} s",
            f"push {_fixed(s.push)} s, pull in background {_fixed(s.pull_accumulated)} s",
        ),
    )
    for name, value, note in rows:
        grid.add_row(Text(name, style="dim"), Text(value, style="bold", justify="right"), Text(note, style="dim"))
    return grid


def _step_time(s: Snapshot, width: int) -> RenderableType:
    total = sum(s.parts.values())
    if not total:
        return Text("step time: no iteration has ended yet", style="dim")
    bar, legend = Text(), Text(f"step {total:.2f} s  ")
    for index, (name, seconds) in enumerate(s.parts.items()):
        colour = _PART_COLOURS[index % len(_PART_COLOURS)]
        bar.append("█" * round(seconds / total * width), style=colour)
        legend.append(f"■ {name} {seconds / total:.0%}  ", style=colour)
    bar.truncate(width)
    return Group(bar, legend)


def _ledger(s: Snapshot) -> Text:
    if not s.ledger:
        return Text("")
    fates = {column: count for column, count in s.ledger.items() if column != "issued"}
    issued = s.ledger.get("issued", 0)
    sign = "=" if issued == sum(fates.values()) else "≠"
    shown = " + ".join(f"{count:,} {column}" for column, count in fates.items() if count) or "0"
    return Text(f"{issued:,} issued {sign} {shown}", style="dim" if sign == "=" else "bold red")


def _sparkline(values: list[float]) -> str:
    top = max(*values, 1e-9) if len(values) > 1 else max(values[0], 1e-9)
    return "".join(_SPARKS[min(int(max(value, 0.0) / top * len(_SPARKS)), len(_SPARKS) - 1)] for value in values)


def _under(row: Mapping[str, int | float | None], prefix: str) -> dict[str, float]:
    return {key.removeprefix(prefix): value or 0 for key, value in row.items() if key.startswith(prefix)}


def _fixed(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _power(value: float | None) -> str:
    return "–" if value is None else f"{value:.1e}"


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
