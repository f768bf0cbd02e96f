"""The rows of a result file, and how a ratio is made."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from statistics import median

import msgspec


class Row(msgspec.Struct, kw_only=True):
    """One measured number beside a peer's or a bound. A ratio above 1 is ahead."""

    metric: str
    unit: str
    ours: float | None
    peer: str | None = None
    peer_value: float | None = None
    published: str | None = None
    ratio: float | None = None
    spread: list[float] | str | None = None

    @classmethod
    def against(
        cls, metric: str, unit: str, ours: list[float], peer: str, peer_value: float, *, less: bool = False
    ) -> Row:
        """The median of our values against a peer's; `less` says that less is better."""
        value = median(ours)
        ratio = peer_value / value if less else value / peer_value
        spread = [min(ours), max(ours)]
        return cls(metric=metric, unit=unit, ours=value, peer=peer, peer_value=peer_value, ratio=ratio, spread=spread)


def write(script: Path, rows: list[Row], quick: bool) -> None:
    """Write results/<script>.json and print the rows."""
    root = script.resolve().parents[2]
    command = f"python {script.resolve().relative_to(root)}" + (" --quick" if quick else "")
    cpu = f"{platform.machine()}, {os.cpu_count()} cores"
    result = {"name": script.stem, "command": command, "cpu": cpu, "rows": rows}
    target = root / "benchmarks" / "results" / f"{script.stem}.json"
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f} x"
        print(f"{row.metric:55} {row.ours} {row.unit}  {row.peer} {row.peer_value}  {ratio}", file=sys.stderr)
