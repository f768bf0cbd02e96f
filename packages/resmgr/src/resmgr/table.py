"""The status as plain tables."""

from collections.abc import Sequence

from resmgr.status import Status
from resmgr.values import Binding


def render(status: Status) -> str:
    parts = [
        _table(
            ["POOL", "HARDWARE", "BACKEND", "NODES", "TOTAL", "FREE", "USED"],
            [
                [p.name, p.hardware, p.backend, str(p.nodes), f"{p.total:g}", f"{p.free:g}", _share(p.total, p.free)]
                for p in status.pools
            ],
        ),
        _table(
            ["ROLE", "HARDWARE", "FALLBACK", "AMOUNT", "NODES", "TOKEN", "LEASE", "NOTE"],
            [_binding(binding, status) for binding in status.bindings],
        ),
        _table(
            ["WAITING", "AMOUNT", "FOR", "PRIORITY"],
            [[w.role, f"{w.amount:g}", "/".join(w.classes), str(w.priority)] for w in status.waiting],
        ),
    ]
    return "\n\n".join(parts)


def _binding(binding: Binding, status: Status) -> list[str]:
    left = status.leases.get(binding.holder)
    return [
        binding.role,
        binding.hardware,
        "fell back" if binding.fell_back else "-",
        f"{binding.amount:g}",
        _some(binding.nodes),
        str(binding.token),
        "ended" if left is None else f"{left:.1f} s",
        _shown(" ".join(f"{name}={value}" for name, value in status.notes.get(binding.id, {}).items())),
    ]


def _shown(note: str) -> str:
    """Notes are free text; a line feed or a terminal's command in one is not to change the table."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in note)


def _some(names: Sequence[str], most: int = 3) -> str:
    return ",".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _share(total: float, free: float) -> str:
    return f"{(total - free) / total:.0%}" if total else "-"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, *rows] if rows else [head, ["(none)"]]
    widths = [max(len(line[i]) for line in lines if i < len(line)) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=False)).rstrip() for line in lines
    )
