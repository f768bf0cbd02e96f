"""A snapshot as Prometheus text (exposition format 0.0.4).

Invariant: every line parses, and each metric has one HELP and one TYPE line before its samples
(tests/samplebuffer/test_samplebuffer_metrics.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

import msgspec

from samplebuffer.book import Staleness
from samplebuffer.lengths import Histogram
from samplebuffer.stats import Stats

Row = tuple[str, float]  # labels, value


def prometheus_text(stats: Stats, prefix: str = "samplebuffer") -> str:
    """The text to serve under /metrics."""
    return "".join(f"{line}\n" for line in _lines(stats, prefix))


def _lines(stats: Stats, prefix: str) -> Iterator[str]:
    ledger = msgspec.structs.asdict(stats.ledger)
    groups = msgspec.structs.asdict(stats.groups)
    off_policy: dict[str, Staleness] = msgspec.structs.asdict(stats.off_policy)
    waiting = {"producers": stats.waits.producers, "consumers": stats.waits.consumers}
    now = ("running", "buffered")
    alive = ("alive", "complete", "waiting")
    metrics: list[tuple[str, str, str, Iterable[Row]]] = [
        ("version", "gauge", "served version", [("", stats.version)]),
        ("staleness_limit", "gauge", "the bound, ceil(alpha)", [("", stats.max_staleness)]),
        ("capacity_groups", "gauge", "groups alive at most", [("", stats.capacity)]),
        ("tasks_drawn_total", "counter", "keys drawn from the tasks", [("", stats.tasks_drawn)]),
        ("tickets_total", "counter", "tickets issued", [("", ledger["issued"])]),
        ("tickets", "gauge", "tickets alive, by state", _labelled("state", {k: ledger[k] for k in now})),
        (
            "tickets_ended_total",
            "counter",
            "tickets ended, by fate",
            _labelled("fate", {k: n for k, n in ledger.items() if k not in (*now, "issued")}),
        ),
        ("groups", "gauge", "groups, by state", _labelled("state", {k: groups[k] for k in alive})),
        (
            "groups_total",
            "counter",
            "groups, by event",
            _labelled("event", {k: n for k, n in groups.items() if k not in alive}),
        ),
        ("staleness_mean", "gauge", "versions behind", _labelled("of", {k: s.mean for k, s in off_policy.items()})),
        ("staleness_max", "gauge", "versions behind", _labelled("of", {k: s.max for k, s in off_policy.items()})),
        ("waiters", "gauge", "coroutines waiting", _labelled("kind", waiting)),
        ("get_batch_wait_seconds_total", "counter", "time in get_batch", [("", stats.waits.get_batch_s)]),
        ("patience_seconds_total", "counter", "time for groups at the bound", [("", stats.waits.patience_s)]),
        ("get_batch_wait_share", "gauge", "share of time in get_batch", [("", stats.waits.get_batch_share)]),
        ("callback_errors_total", "counter", "cancel callbacks that raised", [("", stats.callback_errors)]),
    ]
    for name, kind, text, rows in metrics:
        yield from _head(f"{prefix}_{name}", kind, text)
        for labels, value in rows:
            yield f"{prefix}_{name}{labels} {value}"
    if stats.lengths:
        yield from _head(f"{prefix}_length", "histogram", "payload lengths, by fate")
        for fate, histogram in stats.lengths.items():
            yield from _histogram(f"{prefix}_length", fate, histogram)


def _head(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"


def _labelled(label: str, values: Mapping[str, float]) -> Iterator[Row]:
    return ((f'{{{label}="{key}"}}', value) for key, value in values.items())


def _histogram(name: str, fate: str, histogram: Histogram) -> Iterator[str]:
    for power, total in enumerate(accumulate(histogram.buckets)):
        yield f'{name}_bucket{{fate="{fate}",le="{2**power}"}} {total}'
    yield f'{name}_bucket{{fate="{fate}",le="+Inf"}} {histogram.count}'
    yield f'{name}_sum{{fate="{fate}"}} {histogram.sum}'
    yield f'{name}_count{{fate="{fate}"}} {histogram.count}'
