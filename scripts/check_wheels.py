"""Build every wheel into dist/, install each component alone into an empty environment, and import it there.

A component must import without its siblings and without torch, Ray or vLLM unless an extra was asked for. Runs on
Python 3.11 and on 3.12 and 3.13 where an interpreter is at hand. Exits 1 naming what failed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UV = str(ROOT / ".tools" / "uv" / "bin" / "uv")
COMPONENTS = ("samplebuffer", "llmproxy", "envmanager", "weightsync", "resmgr")
HEAVY = ("torch", "ray", "vllm", "transformers")

IMPORT = """
import importlib, sys
name, *absent = sys.argv[1:]
module = importlib.import_module(name)
missing = [n for n in module.__all__ if not hasattr(module, n)]
assert not missing, f"{name}.__all__ names {missing}, which are not there"
loaded = [n for n in absent if n in sys.modules]
assert not loaded, f"importing {name} loaded {loaded}"
"""


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        wheels = build(ROOT / "dist")
        check_contents(wheels["rollart"], "rollart")
        for python in interpreters():
            for component in COMPONENTS:
                check_alone(component, wheels[component], python, Path(folder) / f"{component}-{version(python)}")
                print(f"{component}: installs and imports alone on {version(python)}")
    return 0


def build(out: Path) -> dict[str, Path]:
    for old in out.glob("rollart*.whl"):
        old.unlink()
    run(UV, "build", "--quiet", "--all-packages", "--wheel", "--out-dir", str(out))
    names = {path.name.split("-")[0].removeprefix("rollart_"): path for path in out.glob("*.whl")}
    absent = {*COMPONENTS, "rollart"} - set(names)
    if absent:
        sys.exit(f"no wheel was built for {', '.join(sorted(absent))}")
    return names


def interpreters() -> list[Path]:
    """Python 3.11, and newer ones that are installed here, pyenv's included."""
    found = [Path(sys.executable).resolve()]
    for newer in ("3.12", "3.13"):
        at_hand = [*Path.home().glob(f".pyenv/versions/{newer}.*/bin/python"), find(newer)]
        first = next(filter(None, at_hand), None)
        if first:
            found.append(first.resolve())
        else:
            print(f"Python {newer} is not at hand: skipped")
    return found


def find(python: str) -> Path | None:
    command = [UV, "python", "find", "--no-python-downloads", "--no-project", python]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return Path(answer.stdout.strip()) if answer.returncode == 0 else None


def check_alone(component: str, wheel: Path, python: Path, venv: Path) -> None:
    check_contents(wheel, component)
    run(UV, "venv", "--quiet", "--python", str(python), str(venv))
    inside = str(venv / "bin" / "python")
    run(UV, "pip", "install", "--quiet", "--python", inside, str(wheel))
    siblings = [name for name in (*COMPONENTS, "rollart") if name != component]
    run(inside, "-W", "error", "-c", IMPORT, component, *siblings, *HEAVY)


def check_contents(wheel: Path, package: str) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    if f"{package}/py.typed" not in names:
        sys.exit(f"{wheel.name} lacks {package}/py.typed")


def version(python: Path) -> str:
    return subprocess.run([str(python), "--version"], capture_output=True, text=True, check=True).stdout.strip()


def run(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    sys.exit(main())
