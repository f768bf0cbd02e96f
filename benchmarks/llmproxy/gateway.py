"""The gateway against public routers: CPU a request, latency, rate, long prompts, streams.

`python benchmarks/llmproxy/gateway.py [--quick]`. Needs wrk (Debian package `wrk`). The peers are installed into
environments of their own. All routers run over the same two mock workers, which answer at once; rounds are
interleaved. Ours routes by trajectory and task, counts, and answers with recording headers; the peers route round
robin, their cheapest policy. Long prompts are token ids: to sglang-router on `/generate`, since its `/v1/completions`
takes none.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from _peers import NEEDS, Load, Process, mock, router, wrk_is_there
from _results import Row, write

CHUNKS = 200
LONG = 131_072
GOALS = {
    "cpu_us_per_request_c64": 60.0,
    "added_p50_ms_c1": 0.12,
    "prompt_131072_named_added_ms": 3.0,
    "prompt_131072_parsed_added_ms": 15.0,
    "stream_cpu_us_per_chunk": 15.0,
}

SGLANG = "sglang-router"

Values = dict[str, dict[str, list[float]]]
"""By metric, then by router: one value a round."""


def bodies(folder: Path) -> dict[str, Path]:
    text = json.dumps({"model": "m", "prompt": "x" * 930, "max_tokens": 16, "temperature": 1.0})
    made = {
        "small": text,
        "long": json.dumps({"model": "m", "prompt": list(range(100_000, 100_000 + LONG)), "max_tokens": 16}),
        "long sglang": json.dumps({"input_ids": list(range(100_000, 100_000 + LONG)), "sampling_params": {}}),
        "stream": json.dumps({"model": "m", "prompt": "x" * 900, "max_tokens": 16, "stream": True}),
    }
    for name, body in made.items():
        (folder / name).write_text(body)
    return {name: folder / name for name in made}


def rounds(routers: dict[str, Process], direct: Process, files: dict[str, Path], count: int, seconds: int) -> Values:
    """Every measurement once a round, the routers in turn."""
    values: Values = defaultdict(lambda: defaultdict(list))

    def each(metric: str, value: Callable[[Load], float], connections: int, body: str, *, named: bool = True) -> None:
        for name, process in routers.items():
            native = name == SGLANG and body == "long"
            file = files["long sglang" if native else body]
            path = "/generate" if native else "/v1/completions"
            values[metric][name].append(value(process.load(connections, seconds, file, path=path, named=named)))

    def over(base: Load) -> Callable[[Load], float]:
        return lambda load: (load.p50_us - base.p50_us) / 1e3

    for _ in range(count):
        each("cpu_us_per_request_c64", lambda load: load.cpu_us / load.requests, 64, "small")
        each("added_p50_ms_c1", over(direct.load(1, seconds, files["small"])), 1, "small")
        each("rate_c512", lambda load: load.requests / load.seconds, 512, "small")
        base = direct.load(1, seconds, files["long"])
        each("prompt_131072_named_added_ms", over(base), 1, "long")
        each("prompt_131072_parsed_added_ms", over(base), 1, "long", named=False)
        each("stream_cpu_us_per_chunk", lambda load: load.cpu_us / load.requests / CHUNKS, 16, "stream")
    return values


def rows(values: Values) -> list[Row]:
    """A row for each peer; where there is a goal, one against it; ours with recording beside ours without."""
    units = {"rate_c512": "requests/s", "cpu_us_per_request_c64": "us", "stream_cpu_us_per_chunk": "us"}
    made = []
    for metric, by_router in values.items():
        unit, less = units.get(metric, "ms"), metric != "rate_c512"
        ours = by_router["ours"]
        for peer in NEEDS:
            if peer in by_router:
                made.append(Row.against(metric, unit, ours, peer, median(by_router[peer]), less=less))
        if metric in GOALS:
            made.append(Row.against(metric, unit, ours, "goal", GOALS[metric], less=less))
        recording = by_router["ours, recording"]
        spread = [min(recording), max(recording)]
        made.append(Row(metric=f"{metric}, recording", unit=unit, ours=median(recording), spread=spread))
    return made


def main() -> None:
    quick = "--quick" in sys.argv
    if not wrk_is_there():
        sys.exit("wrk is needed: apt-get install wrk")
    with ExitStack() as stack:
        files = bodies(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        workers = [stack.enter_context(mock(CHUNKS)) for _ in range(2)]
        small = files["small"].read_bytes()
        for worker in workers:
            worker.ready(small, expected := _answer(worker, small))
        routers: dict[str, Process] = {}
        missing: list[Row] = []
        for name in ("ours", "ours, recording", *NEEDS):
            try:
                routers[name] = stack.enter_context(router(name, workers, quick))
                routers[name].ready(small, expected)
            except OSError as error:
                if name.startswith("ours"):
                    raise
                routers.pop(name, None)
                row = Row(metric="cpu_us_per_request_c64", unit="us", ours=None, peer=name, spread=str(error))
                missing.append(row)
        rounds(routers, workers[0], files, 1, 1)  # warms up
        values = rounds(routers, workers[0], files, *((2, 1) if quick else (3, 2)))
    write(Path(__file__), rows(values) + missing, quick)


def _answer(worker: Process, body: bytes) -> object:
    """What a worker says itself, once it listens."""
    while True:
        try:
            return worker.post(body)
        except OSError:
            continue


if __name__ == "__main__":
    main()
