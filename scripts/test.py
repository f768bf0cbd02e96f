"""Run the tests, each folder in a process of its own, and add up the counts.

Ray, vLLM and torch leave traces in a process that outlive a test (an authentication mode, signal handlers, child
processes), so packages that users run apart are tested apart.

    python scripts/test.py [-m MARKERS] [pytest options]
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOTHING_SELECTED = 5
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|error)")


def main() -> int:
    totals: Counter[str] = Counter()
    broken = []
    begun = time.monotonic()
    for name, words in groups():
        print(f"== {name}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", *words, *sys.argv[1:]]
        status, last = run(command)
        totals.update({what: int(count) for count, what in _COUNT.findall(last)})
        if status not in (0, NOTHING_SELECTED):
            broken.append(name)
    seconds = time.monotonic() - begun
    print(f"== all in {seconds:.0f} s" + (f"; not clean: {', '.join(broken)}" if broken else ""))
    print(f"{totals['passed']} passed, {totals['failed'] + totals['error']} failed, {totals['skipped']} skipped")
    return int(bool(broken))


def groups() -> list[tuple[str, list[str]]]:
    """Every folder of tests; those that start Ray sessions of rollart's apart from the rest of rollart."""
    found = []
    for folder in sorted(path for path in (ROOT / "tests").iterdir() if any(path.rglob("test_*.py"))):
        sessions = sorted(map(str, folder.glob("*distributed*.py")))
        found.append((folder.name, [str(folder), *(f"--ignore={path}" for path in sessions)]))
        if sessions:
            found.append((f"{folder.name}, distributed", sessions))
    return found


def run(command: list[str]) -> tuple[int, str]:
    """Run with the output passed on; the exit status and the last line."""
    last = ""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, errors="replace") as process:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            last = line if line.strip() else last
    return process.returncode, last


if __name__ == "__main__":
    sys.exit(main())
