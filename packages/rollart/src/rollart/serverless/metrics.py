"""What a function server did, as Prometheus text."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

import msgspec

from rollart.serverless.workers import WorkerStats

BOUNDS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class Calls(msgspec.Struct):
    """Calls by HTTP status, answers that were there already, and how long calls took (a histogram)."""

    by_code: dict[int, int] = {}
    replayed: int = 0
    buckets: list[int] = msgspec.field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    seconds: float = 0.0

    def add(self, code: int, seconds: float) -> None:
        self.by_code[code] = self.by_code.get(code, 0) + 1
        self.buckets[bisect.bisect_left(BOUNDS_S, seconds)] += 1
        self.seconds += seconds


def utilisation(workers: WorkerStats) -> float:
    """The share of the processes' life in which they worked."""
    return workers.busy_s / workers.alive_s if workers.alive_s else 0.0


def prometheus_text(calls: Calls, workers: WorkerStats) -> str:
    return "".join(_lines(calls, workers))


def _lines(calls: Calls, workers: WorkerStats) -> Iterator[str]:
    yield from _family("calls_total", "counter", "Calls by HTTP status.")
    for code, count in sorted(calls.by_code.items()):
        yield f'rollart_function_calls_total{{code="{code}"}} {count}\n'
    yield from _value("replayed_total", "counter", "Answers given again for an idempotency key.", calls.replayed)
    yield from _family("seconds", "histogram", "Seconds from a call to its answer, waiting included.")
    total = 0
    for bound, count in zip((*BOUNDS_S, "+Inf"), calls.buckets, strict=True):
        total += count
        yield f'rollart_function_seconds_bucket{{le="{bound}"}} {total}\n'
    yield f"rollart_function_seconds_sum {calls.seconds:.15g}\nrollart_function_seconds_count {total}\n"
    yield from _family("workers", "gauge", "Processes by what they do.")
    for state in ("starting", "busy", "idle"):
        yield f'rollart_function_workers{{state="{state}"}} {getattr(workers, state)}\n'
    yield from _value("waiting", "gauge", "Calls that wait for a process.", workers.waiting)
    yield from _value("started_total", "counter", "Processes started.", workers.started)
    yield from _value("ended_total", "counter", "Processes ended.", workers.ended)
    yield from _value("busy_seconds_total", "counter", "Seconds that processes worked.", workers.busy_s)
    yield from _value("alive_seconds_total", "counter", "Seconds that processes lived.", workers.alive_s)
    yield from _value("utilisation", "gauge", "busy_seconds_total / alive_seconds_total.", utilisation(workers))
    yield from _value("cold_starts_total", "counter", "Calls that waited for a start.", workers.cold_starts)
    yield from _value("cold_start_seconds_total", "counter", "How long they waited for it.", workers.cold_start_s)


def _family(name: str, kind: str, about: str) -> Iterator[str]:
    yield f"# HELP rollart_function_{name} {about}\n# TYPE rollart_function_{name} {kind}\n"


def _value(name: str, kind: str, about: str, value: float) -> Iterator[str]:
    yield from _family(name, kind, about)
    yield f"rollart_function_{name} {value:.15g}\n"
