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
            assert event["name"] in {"process_name", "process_sort_index"} and event["args"]
        else:
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0 and event["tid"] >= 1
        if event["ph"] == "i":
            assert event["s"] == "p"
        if event["ph"] == "C":
            assert event["args"] and all(isinstance(value, int | float) for value in event["args"].values())
    named = {event["pid"] for event in events if event["name"] == "process_name"}
    assert named >= {event["pid"] for event in events}
    return events


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
        tracks = defaultdict(list)
        for event in load(path):
            if event["ph"] == "X":
                tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
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
