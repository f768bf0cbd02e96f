"""Writing what a benchmark of this folder found."""

from __future__ import annotations

import os
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

import msgspec

Row = dict[str, Any]


def row(
    metric: str, unit: str, ours: float | list[float], peer: str | None = None, value: float | None = None
) -> Row:
    """The median of `ours`; the ratio is left to those who know whether more is better."""
    found = sorted(ours) if isinstance(ours, list) else [ours]
    median = statistics.median(found)
    nothing = {"published": None, "ratio": None, "spread": [found[0], found[-1]]}
    return {"metric": metric, "unit": unit, "ours": median, "peer": peer, "peer_value": value, **nothing}


def write(script: str, rows: list[Row], *, keep: bool = False) -> None:
    """With `keep`, rows that are there stay unless there is a new one of the same metric."""
    path = Path(script).resolve()
    quick = " --quick" if "--quick" in sys.argv else ""
    result = {
        "name": path.stem,
        "command": f"python benchmarks/weightsync/{path.name}{quick}",
        "cpu": f"{platform.machine()}, {os.cpu_count()} cores",
        "rows": rows,
    }
    out = path.parents[1] / "results" / f"{path.stem}.json"
    if keep and out.exists():
        new = {each["metric"] for each in rows}
        old = msgspec.json.decode(out.read_bytes())["rows"]
        result["rows"] = [*(each for each in old if each["metric"] not in new), *rows]
    out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    for each in rows:
        print({key: value for key, value in each.items() if value is not None})
