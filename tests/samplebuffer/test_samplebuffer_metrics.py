"""What the buffer tells about itself."""

from __future__ import annotations

import re
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from samplebuffer import SampleBuffer, Ticket, prometheus_text
from samplebuffer.lengths import Lengths


def run(ticket: Ticket, payload: str, reward: float = 1.0) -> str:
    ticket.stamp(ticket.issued_version)
    return ticket.finish(payload, reward)


def busy_buffer() -> SampleBuffer:
    """One group delivered, one filtered, one stale in the queue, one surplus that came late."""
    buf = SampleBuffer(
        count(),
        batch_groups=1,
        group_size=2,
        alpha=0,
        spare_members=1,
        keep=lambda group: group.key != 1,
        length=len,
    )
    for payload in ("aaaa", "bbbbb", "x"):
        tickets = [ticket for ticket in (buf.next_ticket_nowait() for _ in range(3)) if ticket]
        for ticket in tickets[:2]:
            run(ticket, payload)
        if payload == "aaaa":
            assert tickets[2].finish("late one", 0.0) == tickets[2].finish("late again", 0.0) == "surplus"
            assert buf.get_batch_nowait(trainer_version=1)
    buf.advance(1)
    return buf


def test_lengths_are_counted_once_by_fate() -> None:
    lengths = busy_buffer().stats().lengths
    assert {fate: (h.count, h.sum) for fate, h in lengths.items()} == {
        "delivered": (2, 8),
        "surplus": (1, 8),
        "filtered": (2, 10),
        "stale": (2, 2),
    }
    assert lengths["delivered"].buckets == [0, 0, 2] and lengths["delivered"].mean == 4.0
    assert lengths["filtered"].buckets == [0, 0, 0, 2]


@given(st.lists(st.integers(0, 100_000), min_size=1))
def test_each_length_is_in_the_first_bucket_that_holds_it(values: list[int]) -> None:
    lengths = Lengths()
    for value in values:
        lengths.add("delivered", value)
    histogram = lengths.histograms()["delivered"]
    assert histogram.count == len(values) and histogram.sum == sum(values)
    for power in range(len(histogram.buckets)):
        assert sum(histogram.buckets[: power + 1]) == sum(value <= 2**power for value in values)


def test_the_prometheus_text_is_well_formed_and_says_what_the_stats_say() -> None:
    stats = busy_buffer().stats()
    lines = prometheus_text(stats).splitlines()
    values, declared = {}, set()
    for line in lines:
        if line.startswith("# TYPE"):
            declared.add(line.split()[2])
        elif not line.startswith("# HELP"):
            match = re.fullmatch(
                r'(samplebuffer_[a-z_]+)(\{[a-z]+="[^"]+"(?:,[a-z]+="[^"]+")*\})? (-?[0-9.e+-]+)', line
            )
            assert match, line
            assert re.sub("_(bucket|sum|count)$", "", match[1]) in declared
            values[match[1] + (match[2] or "")] = float(match[3])
    assert len(values) == len([line for line in lines if not line.startswith("#")])
    assert values['samplebuffer_tickets_ended_total{fate="filtered"}'] == 2
    assert values['samplebuffer_groups_total{event="delivered"}'] == 1
    assert values['samplebuffer_staleness_max{of="trainer_lag"}'] == 1
    assert values['samplebuffer_length_bucket{fate="delivered",le="2"}'] == 0
    assert values['samplebuffer_length_bucket{fate="delivered",le="4"}'] == 2
    assert values['samplebuffer_length_bucket{fate="delivered",le="+Inf"}'] == 2


def test_reading_changes_nothing() -> None:
    buf = busy_buffer()
    before = buf.state_dict()
    assert buf.stats() == buf.stats() and buf.stats().as_dict()["groups"]["recycled"] == 1
    assert buf.state_dict() == before
