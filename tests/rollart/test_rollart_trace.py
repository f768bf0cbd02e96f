"""trace.json: the format, its tracks, its bounds, and what a kill or a resume leaves."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.observe import CorruptFile, Trace, read_trace

PHASES = {"X", "i", "C", "M"}


def load(path: Path) -> list[dict[str, Any]]:
    """Read and check a trace as strictly as its readers do: the JSON array form of the trace format."""
    events = json.loads(path.read_text())
    assert isinstance(events, list)
    for event in events:
        assert event["ph"] in PHASES and isinstance(event["name"], str)
        assert event["pid"] >= 1 and event["tid"] >= 0
        if event["ph"] == "M":
            assert event["name"] in {"process_name", "process_sort_index", "thread_name"} and event["args"]
        else:
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0 and event["tid"] >= 1
        if event["ph"] == "i":
            assert event["s"] == "p"
        if event["ph"] == "C":
            assert event["args"] and all(isinstance(value, int | float) for value in event["args"].values())
    for _, spans in by_track(events).items():
        open_until: list[int] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1], "spans of a track nest"
            open_until.append(end)
    named = {event["pid"] for event in events if event["name"] == "process_name"}
    assert named >= {event["pid"] for event in events}
    return events


def by_track(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    return tracks


def groups(events: list[dict[str, Any]]) -> dict[str, int]:
    return {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}


def make(path: Path, now: float = 100.0, **options: int) -> tuple[Trace, list[float]]:
    """A trace and its clock: a list whose only element is the time."""
    clock = [now]
    return Trace(path, lambda: clock[0], **options), clock


def test_resources_marks_and_counters_have_their_tracks(tmp_path: Path):
    path = tmp_path / "trace.json"
    trace, clock = make(path)
    trace.span("gen-0", "generate", 100.0, 101.5, tokens=12)
    with trace.measure("train", "train_step", version=3):
        clock[0] = 102.0
    trace.mark("controller", "resume", version=3)
    trace.count("staleness", mean=0.5, max=1)
    trace.flush(1, 100.0, 102.0, wall=2.0)
    trace.close()
    events = load(path)
    spans = {event["name"]: event for event in events if event["ph"] == "X"}
    assert (spans["generate"]["ts"], spans["generate"]["dur"]) == (0, 1_500_000)
    assert spans["generate"]["args"] == {"tokens": 12}
    assert (spans["train_step"]["ts"], spans["train_step"]["dur"]) == (0, 2_000_000)
    assert spans["iteration 1"]["args"] == {"step": 1, "wall": 2.0}
    assert set(groups(events)) == {"gen-0", "train", "controller", "counters", "iterations"}
    sort = {event["pid"]: event["args"]["sort_index"] for event in events if event["name"] == "process_sort_index"}
    order = sorted(groups(events), key=lambda name: sort[groups(events)[name]])
    assert order == ["iterations", "counters", "controller", "gen-0", "train"]


_spans = st.lists(st.tuples(st.floats(0, 50), st.floats(0, 20), st.sampled_from(["gen-0", "env"])), max_size=30)


@settings(max_examples=40)
@given(st.lists(_spans, min_size=1, max_size=3))
def test_spans_of_a_track_never_overlap(tmp_path_factory, flushes):
    path = tmp_path_factory.mktemp("run") / "trace.json"
    for resumed in (False, True):
        trace, _ = make(path)
        for step, spans in enumerate(flushes, 1):
            for start, length, resource in spans:
                trace.span(resource, "work", 100 + start, 100 + start + length)
            trace.flush(step, 100.0, 100.0)
        trace.close()
        tracks = by_track(load(path))
        for track in tracks.values():
            track.sort()
            assert all(end <= start for (_, end), (start, _) in pairwise(track))
        assert sum(map(len, tracks.values())) == (1 + resumed) * (sum(map(len, flushes)) + len(flushes))


def test_spans_past_the_limit_are_counted(tmp_path: Path):
    path = tmp_path / "trace.json"
    trace, _ = make(path, limit=3)
    for _ in range(2):
        for _ in range(5):
            trace.span("gen-0", "generate", 100.0, 101.0)
            trace.mark("env", "reset")
        trace.span("train", "train_step", 100.0, 101.0)
        trace.flush(1, 100.0, 101.0)
    trace.close()
    events = load(path)
    assert sum(event["name"] == "generate" for event in events) == 6
    assert sum(event["name"] == "train_step" for event in events) == 2
    for event in events:
        if event["name"] == "iteration 1":
            assert event["args"] == {"step": 1, "dropped gen-0": 2, "dropped env": 2}


@settings(max_examples=40)
@given(st.data())
def test_a_file_cut_at_any_byte_reads_as_its_whole_events(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("run") / "trace.json"
    trace, _ = make(path)
    sizes = [0]
    for step in (1, 2):
        trace.span("gen-0", "generate", 100.0 + step, 100.5 + step)
        trace.flush(step, 100.0 + step, 101.0 + step)
        sizes.append(path.stat().st_size)
    trace.close()
    events, whole = read_trace(path), path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    kept = read_trace(path)
    assert kept == events[: len(kept)]
    assert len(kept) == sum(line.strip(b"[]\n") != b"" for line in whole[:cut].splitlines(True) if b"\n" in line)
    make(path)[0].close()
    assert read_trace(path) == kept
    load(path)


def test_a_kill_in_the_first_bytes_of_an_append_loses_nothing_before_it(tmp_path: Path):
    path = tmp_path / "trace.json"
    trace, _ = make(path)
    trace.flush(1, 100.0, 101.0)
    before, events = path.read_bytes(), read_trace(path)
    trace.flush(2, 101.0, 102.0)
    trace.close()
    after = path.read_bytes()
    for written in range(len(after) - len(before) + 3):
        start = len(before) - 2
        path.write_bytes(after[: start + written] + before[start + written :])
        assert read_trace(path)[: len(events)] == events


def test_a_resumed_trace_continues_after_the_last_event(tmp_path: Path):
    path = tmp_path / "trace.json"
    trace, _ = make(path)
    trace.span("gen-0", "generate", 100.0, 103.0)
    trace.flush(1, 100.0, 102.0)
    trace.close()
    trace, _ = make(path, now=7.0)
    trace.span("train", "train_step", 7.5, 8.0)
    trace.span("gen-0", "generate", 7.0, 8.0)
    trace.flush(2, 7.0, 9.0)
    trace.close()
    events = load(path)
    generate = [event for event in events if event["name"] == "generate"]
    assert [event["ts"] for event in generate] == [0, 3_000_000]
    assert generate[0]["pid"] == generate[1]["pid"] and generate[0]["tid"] == generate[1]["tid"]
    [train] = [event for event in events if event["name"] == "train_step"]
    assert train["ts"] == 3_500_000
    assert len(groups(events)) == sum(event["name"] == "process_name" for event in events) == 3


def test_an_empty_trace_is_a_valid_file(tmp_path: Path):
    path = tmp_path / "trace.json"
    assert read_trace(path) == []
    make(path)[0].close()
    assert load(path) == [] == read_trace(path)


def test_damage_in_the_middle_names_the_line(tmp_path: Path):
    path = tmp_path / "trace.json"
    path.write_text('[\n{"name": 3}\n]\n')
    with pytest.raises(CorruptFile, match=r"trace\.json:2"):
        read_trace(path)


def play(trace: Trace, trajectory: str, start: float, turns: int, *, rewarded: bool = True) -> float:
    """A trajectory of one second a phase; returns when it ended."""
    phases = ["reset", *["generate", "step"] * turns, *(["reward"] if rewarded else [])]
    for number, phase in enumerate(phases):
        trace.story(trajectory, phase, start + number, start + number + 1)
    return start + len(phases)


def told(events: list[dict[str, Any]]) -> dict[str, tuple[int, list[str]]]:
    """The row of each trajectory, and its phases."""
    pid = groups(events)["trajectories"]
    spans = [event for event in events if event["ph"] == "X" and event["pid"] == pid]
    phases = {"reset", "generate", "step", "reward"}
    stories = {}
    for outer in spans:
        if outer["name"] not in phases:
            inside = range(outer["ts"], outer["ts"] + outer["dur"])
            names = [
                e["name"] for e in spans if e["name"] in phases and e["tid"] == outer["tid"] and e["ts"] in inside
            ]
            stories[outer["name"].removeprefix("trajectory ")] = (outer["tid"], names)
    return stories


def test_a_trajectory_has_a_row_to_itself(tmp_path: Path):
    path = tmp_path / "trace.json"
    trace, _ = make(path)
    end = play(trace, "a", 100.0, 2)
    play(trace, "b", 100.0, 1)
    play(trace, "c", end, 1)
    trace.flush(1, 100.0, 110.0)
    trace.close()
    events = load(path)
    one = ["reset", "generate", "step", "reward"]
    assert told(events) == {"a": (1, ["reset", *["generate", "step"] * 2, "reward"]), "b": (2, one), "c": (1, one)}
    names = [(event["tid"], event["args"]["name"]) for event in events if event["name"] == "thread_name"]
    assert names == [(1, "row 1"), (2, "row 2")]


def test_a_trajectory_keeps_its_row_over_iterations_until_nothing_is_heard_of_it(tmp_path: Path):
    path = tmp_path / "trace.json"
    trace, _ = make(path, rows=1)
    trace.story("long", "reset", 100.0, 101.0)
    trace.flush(1, 100.0, 102.0)
    trace.story("long", "generate", 101.0, 103.0)
    play(trace, "crowded out", 103.0, 1)
    trace.flush(2, 102.0, 104.0)
    for step in range(3, 6):
        trace.flush(step, 104.0, 105.0)
    play(trace, "next", 110.0, 1)
    trace.flush(6, 105.0, 115.0)
    trace.close()
    events = load(path)
    assert set(told(events)) == {"long", "next"}
    [second] = [event for event in events if event["name"] == "iteration 2"]
    assert second["args"]["dropped trajectories"] == 4


def test_phases_past_the_limit_are_counted(tmp_path: Path):
    path = tmp_path / "trace.json"
    trace, _ = make(path, limit=3)
    play(trace, "a", 100.0, 4)
    trace.flush(1, 100.0, 110.0)
    trace.close()
    assert told(load(path)) == {"a": (1, ["reset", "generate", "step"])}
    assert read_trace(path)[-1].name != "reward"


def test_a_long_run_ends_its_trace_at_the_bound(tmp_path: Path):
    path = tmp_path / "trace.json"
    trace, _ = make(path, max_bytes=60_000)
    sizes = []
    for step in range(400):
        for number in range(100):
            trace.span("gen-0", "generate", 100.0 + step, 100.0 + step + number / 100)
        play(trace, f"t{step}", 100.0 + step, 1)
        trace.flush(step, 100.0 + step, 101.0 + step)
        sizes.append(path.stat().st_size)
    trace.close()
    steps = [a - b for b, a in pairwise(sizes)]
    assert steps[0] > 3 * steps[10] > 0, "first all of it, then little"
    assert sizes[-1] == sizes[-2] <= 60_000
    load(path)


_lives = st.lists(st.tuples(st.floats(0, 30), st.integers(0, 4), st.booleans()), max_size=20)


@settings(max_examples=40)
@given(st.lists(_lives, min_size=1, max_size=3), st.integers(1, 5))
def test_trajectories_of_any_times_fit_their_rows(tmp_path_factory, flushes, rows):
    path = tmp_path_factory.mktemp("run") / "trace.json"
    trace, _ = make(path, rows=rows)
    for step, lives in enumerate(flushes):
        for number, (start, turns, rewarded) in enumerate(lives):
            play(trace, f"{step}-{number}", 100.0 + start, turns, rewarded=rewarded)
        trace.flush(step, 100.0, 101.0)
    trace.close()
    load(path)
