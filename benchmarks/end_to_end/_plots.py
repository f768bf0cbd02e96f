"""Drawings of results: for each experiment our values as bars, published ones as marks or ranges."""

from __future__ import annotations

from html import escape
from pathlib import Path

from _paper import Row

_ROW, _LEFT, _WIDTH, _RIGHT, _TOP = 22, 510, 360, 130, 34
_LABEL = 78


def draw(rows: list[Row], folder: Path) -> None:
    """One SVG file an experiment, of the rows that have a published value."""
    folder.mkdir(parents=True, exist_ok=True)
    experiments: dict[str, list[Row]] = {}
    for row in rows:
        if row.published is not None and row.ours is not None:
            experiments.setdefault(row.metric.partition(": ")[0], []).append(row)
    for name, each in experiments.items():
        (folder / f"{name}.svg").write_text(_svg(name, each), encoding="utf-8")


def _svg(name: str, rows: list[Row]) -> str:
    height = _TOP + _ROW * len(rows) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + _RIGHT}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<text x="8" y="20" font-weight="bold">{escape(name)}: simulated (bar), published (red)</text>',
    ]
    for index, row in enumerate(rows):
        parts += _bar(row, _TOP + index * _ROW)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _bar(row: Row, y: int) -> list[str]:
    low, high = _published(row)
    ours = row.ours or 0.0
    scale = _WIDTH / max(ours, high)
    left, right = _LEFT + low * scale, _LEFT + high * scale
    label = escape(f"{row.metric.partition(': ')[2][:_LABEL]}, {row.unit}")
    ticks = [
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y + 2}" y2="{y + 18}" stroke="#c22" stroke-width="2"/>'
        for x in dict.fromkeys((left, right))
    ]
    published = f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
    return [
        f'<text x="8" y="{y + 14}">{label}</text>',
        f'<rect x="{_LEFT}" y="{y + 3}" width="{ours * scale:.1f}" height="14" fill="#8ab"/>',
        f'<line x1="{left:.1f}" x2="{right:.1f}" y1="{y + 10}" y2="{y + 10}" stroke="#c22" stroke-width="3"/>',
        *ticks,
        f'<text x="{_LEFT + _WIDTH + 6}" y="{y + 14}">{ours:.3g} / {published}</text>',
    ]


def _published(row: Row) -> tuple[float, float]:
    numbers = [float(number) for number in (row.published or "0").split("-")]
    return numbers[0], numbers[-1]
