"""What each resource did during one iteration, from the trace.

Invariant: every span that touches the window is either listed or counted in its row's level, so a row is
never emptier than the resource was
(tests/rollart/report/test_rollart_report_data.py::test_no_span_of_a_window_is_lost).
A row with few spans at a time lists them; a row with many (a hundred environments) gives the number that ran
at each moment instead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec

from rollart.observe.trace import COUNTERS, ITERATIONS, TRAJECTORIES, Event, resource_order

# The environments' row says what trajectories did; one row for each is for Perfetto.
_NO_ROWS = (ITERATIONS, COUNTERS, TRAJECTORIES)
_UNTOLD = f"dropped {TRAJECTORIES}"
MAX_LANES = 8  # more bars in one row than this cannot be told apart, or tapped
MAX_SPANS = 600  # of one row
MAX_MARKS = 50  # of one row


class Bar(msgspec.Struct):
    """One span, in seconds from the start of the window. `seconds` is its whole length."""

    name: str
    start: float
    end: float
    lane: int
    seconds: float
    details: list[str]


class Mark(msgspec.Struct):
    name: str
    at: float


class Row(msgspec.Struct):
    """One resource. Exactly one of `bars` and `level` (time, number running) is filled unless it was idle."""

    resource: str
    kind: str
    busy: float  # share of the window with at least one span
    lanes: int = 1
    bars: list[Bar] = []
    level: list[tuple[float, int]] = []
    marks: list[Mark] = []


class Window(msgspec.Struct):
    """One iteration. `suspended` are the intervals in which no generation was admitted."""

    step: int
    why: str
    length: float
    rows: list[Row]
    suspended: list[tuple[float, float]]
    dropped: int  # spans that the trace did not keep


def windows(events: Sequence[Event]) -> list[Window]:
    """The iterations worth looking at: a typical one, the slowest, the last."""
    names = {e.pid: str(e.args["name"]) for e in events if e.ph == "M" and e.name == "process_name"}
    iterations = {  # of a step that was run twice, the later counts
        int(e.args.get("step") or 0): e for e in events if e.ph == "X" and names.get(e.pid) == ITERATIONS and e.dur
    }
    return [_window(why, step, iterations[step], events, names) for why, step in _choose(iterations)]


def _choose(iterations: dict[int, Event]) -> list[tuple[str, int]]:
    if not iterations:
        return []
    by_time = sorted(iterations, key=lambda step: iterations[step].dur or 0)
    late = sorted(list(iterations)[len(iterations) // 2 :], key=lambda step: iterations[step].dur or 0)
    wanted = (("typical", late[len(late) // 2]), ("slowest", by_time[-1]), ("last", max(iterations)))
    chosen = {step: why for why, step in reversed(wanted)}
    return [(why, step) for why, step in wanted if chosen[step] == why]


def _window(why: str, step: int, iteration: Event, events: Iterable[Event], names: dict[int, str]) -> Window:
    start, length = iteration.ts or 0, iteration.dur or 1
    spans, marks = defaultdict(list), defaultdict(list)
    for event in events:
        resource = names.get(event.pid, "?")
        if event.ts is None or resource in _NO_ROWS:
            continue
        if event.ph == "X" and event.ts < start + length and event.ts + (event.dur or 0) > start:
            spans[resource].append(event)
        elif event.ph == "i" and start <= event.ts <= start + length:
            marks[resource].append(Mark(event.name, (event.ts - start) / 1e6))
    rows = [
        _row(resource, spans[resource], marks[resource][:MAX_MARKS], start, length)
        for resource in sorted(names.values(), key=lambda name: (resource_order(name), name))
        if resource not in _NO_ROWS
    ]
    dropped = sum(int(n or 0) for key, n in iteration.args.items() if key.startswith("dropped ") and key != _UNTOLD)
    return Window(step, why, length / 1e6, rows, _suspended(spans["controller"], start, length), dropped)


def _row(resource: str, spans: list[Event], marks: list[Mark], start: int, length: int) -> Row:
    bars = sorted((_bar(span, start, length) for span in spans), key=lambda bar: bar.start)
    free: list[float] = []
    for bar in bars:
        bar.lane = next((lane for lane, end in enumerate(free) if end <= bar.start), len(free))
        free[bar.lane : bar.lane + 1] = [bar.end]
    level = _level(bars)
    row = Row(resource, resource.split("-", 1)[0], _busy(level) / (length / 1e6), marks=marks)
    if len(free) > MAX_LANES or len(bars) > MAX_SPANS:
        row.level = _thin(level, length / 1e6)
    else:
        row.bars, row.lanes = bars, max(len(free), 1)
    return row


def _bar(span: Event, start: int, length: int) -> Bar:
    begin, duration = (span.ts or 0) - start, span.dur or 0
    details = [f"{key} {value}" for key, value in span.args.items()]
    clipped = max(begin, 0) / 1e6, min(begin + duration, length) / 1e6
    return Bar(span.name, *clipped, 0, duration / 1e6, details)


def _level(bars: list[Bar]) -> list[tuple[float, int]]:
    """How many bars are open, from each moment at which that changes."""
    changes: dict[float, int] = defaultdict(int)
    for bar in bars:
        changes[bar.start] += 1
        changes[bar.end] -= 1
    level, running = [], 0
    for at in sorted(changes):
        running += changes[at]
        level.append((at, running))
    return level


def _busy(level: list[tuple[float, int]]) -> float:
    return sum(then - at for (at, running), (then, _) in pairwise(level) if running)


def _thin(level: list[tuple[float, int]], length: float, bins: int = 300) -> list[tuple[float, int]]:
    """At most `bins` moments, each with the most that ran until the next."""
    if len(level) <= bins:
        return level
    most: list[int] = [0] * bins
    running = edge = 0
    for at, now in level:
        slot = min(int(at / length * bins), bins - 1)
        for passed in range(edge, slot + 1):
            most[passed] = max(most[passed], running)
        most[slot] = max(most[slot], now)
        running, edge = now, slot
    return [(slot * length / bins, n) for slot, n in enumerate(most)]


def _suspended(controller: list[Event], start: int, length: int) -> list[tuple[float, float]]:
    """From the start of each `suspend` to the end of the `resume` that follows it."""
    found = []
    begin: int | None = None
    for span in sorted(controller, key=lambda span: span.ts or 0):
        if span.name == "suspend" and begin is None:
            begin = span.ts or 0
        elif span.name == "resume" and begin is not None:
            end = (span.ts or 0) + (span.dur or 0)
            found.append((max(begin - start, 0) / 1e6, min(end - start, length) / 1e6))
            begin = None
    return found
