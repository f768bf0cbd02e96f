"""Run every benchmark, one after the other, then write RESULTS.md.

python benchmarks/run_all.py --quick     under 3 minutes each
python benchmarks/run_all.py [NAME ...]  the full ones, or those whose path contains a NAME
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIMIT_S = 3 * 3600
LIMIT_QUICK_S = 10 * 60


def main() -> int:
    quick = "--quick" in sys.argv
    names = [word for word in sys.argv[1:] if not word.startswith("--")]
    failed = []
    for script in sorted(HERE.glob("*/*.py")):
        path = str(script.relative_to(HERE.parent))
        # A leading underscore marks what several scripts of a folder share.
        if script.name.startswith("_") or (names and not any(name in path for name in names)):
            continue
        print(f"== {path}", flush=True)
        command = [sys.executable, path, *(["--quick"] if quick else [])]
        done = subprocess.run(command, cwd=HERE.parent, timeout=LIMIT_QUICK_S if quick else LIMIT_S, check=False)
        if done.returncode:
            failed.append(path)
    subprocess.run([sys.executable, str(HERE / "render.py")], check=True)
    if failed:
        print("failed:", *failed, sep="\n  ", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
