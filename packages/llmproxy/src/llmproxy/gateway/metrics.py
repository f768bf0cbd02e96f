"""What the gateway counts, in Prometheus' text format."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable

from llmproxy.config import ProxyStats

_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    """Counters since the start."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int, str]] = Counter()
        """By endpoint, status and worker ("" when none answered)."""
        self.refused: Counter[str] = Counter()
        self.retries = self.chunks = self.disconnects = self.truncated = 0
        self._buckets = [0] * (len(_BOUNDS) + 1)
        self._seconds = 0.0

    def answered(self, endpoint: str, status: int, worker: str, seconds: float) -> None:
        self.requests[endpoint, status, worker] += 1
        self._buckets[bisect_left(_BOUNDS, seconds)] += 1
        self._seconds += seconds

    def render(self, stats: ProxyStats, gauges: dict[str, int]) -> bytes:
        lines: list[str] = []

        def family(name: str, kind: str, text: str, samples: Iterable[tuple[str, float]]) -> None:
            lines.append(f"# HELP llmproxy_{name} {text}")
            lines.append(f"# TYPE llmproxy_{name} {kind}")
            lines.extend(f"llmproxy_{name}{labels} {value}" for labels, value in samples)

        family(
            "requests_total",
            "counter",
            "Requests answered by a worker, by status; 499 are those whose client went away.",
            (
                (f'{{endpoint="{endpoint}",status="{status}",worker="{_escape(worker)}"}}', count)
                for (endpoint, status, worker), count in sorted(self.requests.items())
            ),
        )
        refused = ((f'{{type="{kind}"}}', count) for kind, count in sorted(self.refused.items()))
        family("refused_total", "counter", "Errors that the gateway answered itself.", refused)
        for name, value, text in (
            ("retries_total", self.retries, "Requests sent to another worker."),
            ("chunks_total", self.chunks, "Pieces of streamed answers passed on."),
            ("client_disconnects_total", self.disconnects, "Requests whose client went away."),
            ("truncated_total", self.truncated, "Answers cut short because their worker was lost."),
        ):
            family(name, "counter", text, [("", value)])
        lines.append("# HELP llmproxy_request_seconds From a request's last byte to the end of its answer.")
        lines.append("# TYPE llmproxy_request_seconds histogram")
        total = 0
        for bound, count in zip((*map(str, _BOUNDS), "+Inf"), self._buckets, strict=True):
            total += count
            lines.append(f'llmproxy_request_seconds_bucket{{le="{bound}"}} {total}')
        lines.append(f"llmproxy_request_seconds_sum {self._seconds:.6f}")
        lines.append(f"llmproxy_request_seconds_count {total}")
        for name, value in gauges.items():
            family(name, "gauge", name.replace("_", " ").capitalize() + ".", [("", value)])
        family("version", "gauge", "Version of the weights that are served.", [("", stats.version)])
        family("suspended", "gauge", "1 while no request is placed.", [("", int(stats.suspended))])
        for name, text, samples in (
            ("worker_serving", "1 while the worker gets traffic.", [int(not w.fenced) for w in stats.workers]),
            ("worker_load_tokens", "Tokens charged to the worker.", [w.load for w in stats.workers]),
            ("worker_running", "Requests at the worker.", [w.running for w in stats.workers]),
        ):
            labels = [f'{{worker="{_escape(w.id)}",hardware="{_escape(w.hardware)}"}}' for w in stats.workers]
            family(name, "gauge", text, zip(labels, samples, strict=True))
        routed = ((f'{{what="{_escape(what)}"}}', count) for what, count in sorted(stats.router.items()))
        family("router", "gauge", "What the routing policy counts.", routed)
        managed = ((f'{{state="{state}"}}', count) for state, count in sorted(stats.requests.items()))
        family("generations", "gauge", "Requests to /generate, by state.", managed)
        return ("\n".join(lines) + "\n").encode()


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
