"""The portable form of uv.lock: every pinned name and version, no address.

A lock as uv writes it names the index it was resolved from and the URL of each file, so it works behind one mirror
only. The portable form drops them; uv resolves the same versions again from whatever index it is configured for.

    python scripts/portable_lock.py            rewrite uv.lock in place
    python scripts/portable_lock.py --check    exit 1, naming the lines, when uv.lock is not portable
    python scripts/portable_lock.py --filter   standard input to standard output (the git clean filter)
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

LOCK = Path(__file__).resolve().parent.parent / "uv.lock"

_FILES = re.compile(r"^(sdist = .*\n|wheels = \[\n(?:    .*\n)*\]\n)", re.MULTILINE)
_METADATA = re.compile(r"^\[package\.metadata(?:\.[\w.-]+)?\]\n(?:(?!\[).*\n)*", re.MULTILINE)
_REGISTRY = re.compile(r'\{ registry = "[^"]*" \}')
_LOCAL_VERSION = re.compile(r'(version = "[^"+]+)\+[^"]+(")')
_BLANKS = re.compile(r"\n{3,}")
_ADDRESS = re.compile(r'://|registry = "(?!pypi")|^(sdist|wheels) = |\bpath = ')


def portable(text: str) -> str:
    """The lock text without file addresses, registries, metadata tables and local version suffixes."""
    text = _FILES.sub("", text)
    text = _METADATA.sub("", text)
    text = _REGISTRY.sub('{ registry = "pypi" }', text)
    text = _LOCAL_VERSION.sub(r"\1\2", text)
    return _BLANKS.sub("\n\n", text).rstrip("\n") + "\n"


def addresses(text: str) -> list[str]:
    """The lines of a lock that hold an address, with their numbers."""
    return [f"{n}: {line.strip()}" for n, line in enumerate(text.splitlines(), 1) if _ADDRESS.search(line)]


def main() -> int:
    if "--filter" in sys.argv:
        sys.stdout.write(portable(sys.stdin.read()))
        return 0
    text = LOCK.read_text()
    if "--check" not in sys.argv:
        LOCK.write_text(portable(text))
        return 0
    found = addresses(text)
    if found:
        print("uv.lock holds addresses; run `make lock`:", *found[:10], sep="\n  ", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
