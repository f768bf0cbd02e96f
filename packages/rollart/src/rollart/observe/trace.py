"""trace.json: what every resource did, in the Chrome trace format that Perfetto opens.

Each resource is a group of tracks. Spans that overlap in time (concurrent generations of one worker) go
to different tracks of their group, because the format allows only nesting on one track. Trajectories are a
group too, of at most `rows` tracks: each has one to itself while it lasts (see `stories`).

Invariants (tests/rollart/test_rollart_trace.py):
- Spans of one track never overlap (`test_spans_of_a_track_never_overlap`).
- After every flush the file is a JSON array with one event per line; killed at any byte it loses only the
  events of the flush that was being written (`test_a_file_cut_at_any_byte_reads_as_its_whole_events`).
- At most `limit` spans per resource, and `limit` marks and counts, are held and written an iteration; the
  rest are counted in the iteration's `dropped` (`test_spans_past_the_limit_are_counted`).
- The file ends at `max_bytes`. Past half of it an iteration's limit is 20 spans per resource, and trajectories
  are left out; past the whole nothing is written (`test_a_long_run_ends_its_trace_at_the_bound`).
- A resumed run continues on the same tracks, after the last event
  (`test_a_resumed_trace_continues_after_the_last_event`). What an interrupted attempt did past its
  checkpoint stays in the trace: the work was done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import BinaryIO

import msgspec

from rollart.observe.errors import CorruptFile
from rollart.observe.files import replace_file
from rollart.observe.steptime import Clock
from rollart.observe.stories import Phase, Stories, Told

Args = Mapping[str, str | int | float | bool | None]

ITERATIONS = "iterations"  # the resource whose spans are the iterations themselves
COUNTERS = "counters"
TRAJECTORIES = "trajectories"
# Rows that a reader wants near the top come first; a resource not named here comes after them, as met.
_ORDER = (ITERATIONS, COUNTERS, "controller", "gen", "env", "reward", "train", "push", "pull", "commit", TRAJECTORIES)
_THIN = 20


class Event(msgspec.Struct, omit_defaults=True):
    """One event of the format. Times are in microseconds; `ph` is X span, i instant, C counter, M metadata."""

    name: str
    ph: str
    pid: int
    tid: int
    ts: int | None = None
    dur: int | None = None
    s: str | None = None
    args: dict[str, str | int | float | bool | None] = {}


class _Pending(msgspec.Struct):
    start: float
    end: float
    name: str
    args: Args


class Trace:
    """Collects what resources did and writes it out once per iteration. Times are the injected clock's."""

    def __init__(
        self, path: Path | str, clock: Clock, *, limit: int = 400, rows: int = 64, max_bytes: int = 128 << 20
    ) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._clock = clock
        self._limit = limit
        self._max_bytes = max_bytes
        self._thin = self._ended = False
        self._stories = Stories(rows, limit)
        self._rows_named = 0
        self._pending: dict[str, list[_Pending]] = {}
        self._points: list[Event] = []
        self._dropped: Counter[str] = Counter()
        self._pids: dict[str, int] = {}
        self._named = 0  # how many of the pids have their names in the file
        self._lanes: dict[int, list[int]] = {}  # pid -> when each of its tracks becomes free
        earlier = read_trace(path)
        self._origin = clock() - self._recall(earlier) / 1e6
        self._file = _reopen(path, earlier)
        self._empty = not earlier

    def span(self, resource: str, name: str, start: float, end: float, **args: str | int | float) -> None:
        """`resource` was busy with `name` from `start` to `end` on the clock."""
        pending = self._pending.setdefault(resource, [])
        if len(pending) < self._limit:
            pending.append(_Pending(start, end, name, args))
        else:
            self._dropped[resource] += 1

    def story(self, trajectory: str, phase: str, start: float, end: float) -> None:
        """`trajectory` ended a phase: its row shows it."""
        self._stories.add(trajectory, Phase(phase, start, end))

    @contextmanager
    def measure(self, resource: str, name: str, **args: str | int | float) -> Iterator[None]:
        start = self._clock()
        try:
            yield
        finally:
            self.span(resource, name, start, self._clock(), **args)

    def mark(self, resource: str, name: str, **args: str | int | float) -> None:
        """Something happened at `resource` now."""
        self._point(resource, name, "i", args)

    def count(self, name: str, **values: float) -> None:
        """A counter track, for example `count("staleness", mean=0.4, max=1)`."""
        self._point(COUNTERS, name, "C", values)

    def flush(self, step: int, start: float, end: float, **args: str | int | float) -> None:
        """Write iteration `step` and everything collected since the last flush."""
        told, untold = self._stories.take()
        if self._thin:
            told, untold = [], untold + sum(len(one.phases) for one in told)
        if untold:
            self._dropped[TRAJECTORIES] = untold
        dropped = {f"dropped {resource}": n for resource, n in self._dropped.items()}
        self._pending[ITERATIONS] = [_Pending(start, end, f"iteration {step}", {"step": step, **args, **dropped})]
        events = [event for resource in self._pending for event in self._place(resource)]
        events += [event for one in told for event in self._tell(one)]
        self._append([*self._names(), *events, *self._points])
        self._pending, self._points = {}, []
        self._dropped.clear()

    def close(self) -> None:
        self._file.close()

    def _point(self, resource: str, name: str, ph: str, args: Args) -> None:
        if len(self._points) < self._limit:
            pid = self._pid(resource)
            scope = "p" if ph == "i" else None
            self._points.append(Event(name, ph, pid, 0, self._micro(self._clock()), s=scope, args=dict(args)))
        else:
            self._dropped[resource] += 1

    def _place(self, resource: str) -> Iterator[Event]:
        """Spans of a resource, each on the first of its tracks that is free; a new track when none is."""
        pid = self._pid(resource)
        lanes = self._lanes.setdefault(pid, [])
        busy = [(free, lane) for lane, free in enumerate(lanes)]
        heapify(busy)
        idle: list[int] = []
        for span in sorted(self._pending[resource], key=lambda span: span.start):
            start, end = self._micro(span.start), self._micro(max(span.end, span.start))
            while busy and busy[0][0] <= start:
                heappush(idle, heappop(busy)[1])
            lane = heappop(idle) if idle else len(lanes)
            lanes[lane : lane + 1] = [end]
            heappush(busy, (end, lane))
            yield Event(span.name, "X", pid, lane + 1, start, end - start, args=dict(span.args))

    def _tell(self, told: Told) -> Iterator[Event]:
        """A span named after the trajectory, and its phases inside."""
        pid = self._pid(TRAJECTORIES)
        start, end = self._micro(told.phases[0].start), self._micro(told.phases[-1].end)
        yield Event(f"trajectory {told.trajectory}", "X", pid, told.row + 1, start, end - start)
        for phase in told.phases:
            start, end = self._micro(phase.start), self._micro(phase.end)
            yield Event(phase.name, "X", pid, told.row + 1, start, end - start)

    def _pid(self, resource: str) -> int:
        return self._pids.setdefault(resource, len(self._pids) + 1)

    def _names(self) -> Iterator[Event]:
        """Names and order of the groups that are new in this flush."""
        for resource, pid in list(self._pids.items())[self._named :]:
            yield Event("process_name", "M", pid, 0, args={"name": resource})
            yield Event("process_sort_index", "M", pid, 0, args={"sort_index": resource_order(resource)})
        self._named = len(self._pids)
        for row in range(self._rows_named, self._stories.rows if TRAJECTORIES in self._pids else 0):
            yield Event("thread_name", "M", self._pids[TRAJECTORIES], row + 1, args={"name": f"row {row + 1}"})
            self._rows_named = row + 1

    def _micro(self, seconds: float) -> int:
        return round((seconds - self._origin) * 1e6)

    def _recall(self, earlier: list[Event]) -> int:
        """Take up the tracks of an earlier attempt; returns when its last event ended."""
        last = 0
        for event in earlier:
            end = (event.ts or 0) + (event.dur or 0)
            last = max(last, end)
            if event.ph == "M" and event.name == "process_name":
                self._pids[str(event.args["name"])] = event.pid
            elif event.ph == "M" and event.name == "thread_name":
                self._rows_named = max(self._rows_named, event.tid)
            elif event.ph == "X":
                lanes = self._lanes.setdefault(event.pid, [])
                lanes.extend([0] * (event.tid - len(lanes)))
                lanes[event.tid - 1] = max(lanes[event.tid - 1], end)
        self._named = len(self._pids)
        return last

    def _append(self, events: list[Event]) -> None:
        place = self._file.seek(-len(_TAIL), 2)
        lines = _lines(events, first=self._empty) + _TAIL
        self._ended = self._ended or place + len(lines) > self._max_bytes
        if self._ended:
            return
        self._file.write(lines)
        self._file.flush()
        self._empty = False
        if place + len(lines) > self._max_bytes // 2:
            self._thin, self._limit = True, min(self._limit, _THIN)


def resource_order(resource: str) -> int:
    """Where a resource's row stands: `gen-1` counts as `gen`."""
    kind = resource.split("-", 1)[0]
    return _ORDER.index(kind) if kind in _ORDER else len(_ORDER)


def read_trace(path: Path | str) -> list[Event]:
    """Every whole event of a trace; none when there is no file. An event that a kill cut short is ignored."""
    path = Path(path)
    lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
    # What follows the last newline is empty, or torn.
    return [
        _decode(path, number, line.removeprefix(b","))
        for number, line in enumerate(lines[:-1], 1)
        if line not in (b"[", b"]", b",")
    ]


def _decode(path: Path, number: int, line: bytes) -> Event:
    try:
        return msgspec.json.decode(line, type=Event)
    except msgspec.DecodeError as error:
        raise CorruptFile(f"{path}:{number} is not a trace event ({error}); remove the line") from error


# One event per line, the comma before it: whatever part of an append is written, the lines before are whole.
_HEAD, _TAIL = b"[\n", b"]\n"


def _lines(events: list[Event], *, first: bool) -> bytes:
    lines = [msgspec.json.encode(event) for event in events]
    return (b"" if first else b",") + b"\n,".join(lines) + b"\n" if lines else b""


def _reopen(path: Path, events: list[Event]) -> BinaryIO:
    """The file with these events and a proper end, whatever a kill left of it."""
    replace_file(path, _HEAD + _lines(events, first=True) + _TAIL)
    return path.open("r+b")
