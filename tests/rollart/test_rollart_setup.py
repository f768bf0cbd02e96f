"""What `make` brings first, on machines that have less or other things than it needs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Says that pip is there and libraries load; installing puts a uv where it is told to.
PYTHON = """#!/bin/sh
case "$*" in
    *"pip install"*) mkdir -p .tools/uv/bin && echo brought > .tools/uv/bin/uv && chmod +x .tools/uv/bin/uv ;;
esac
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder with the script, and a `bin` that comes first on its PATH."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / ".tools").mkdir()
    program(tmp_path, "python3", PYTHON)
    program(tmp_path, "apt-get", "#!/bin/sh\n")
    return tmp_path


def program(folder: Path, name: str, text: str) -> None:
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / name).write_text(text)
    (folder / "bin" / name).chmod(0o755)


def setup(folder: Path) -> subprocess.CompletedProcess[str]:
    path = f"{folder / 'bin'}:/usr/bin:/bin"
    return subprocess.run(
        ["scripts/setup.sh"], cwd=folder, env={"PATH": path}, capture_output=True, text=True, check=True
    )


@pytest.mark.parametrize(("version", "taken"), [("0.5.31", False), ("0.13.9", True), ("1.0.0", True)])
def test_a_uv_that_is_too_old_is_not_taken(copy: Path, version: str, taken: bool) -> None:
    program(copy, "uv", f"#!/bin/sh\necho uv {version} '(of a day)'\n")
    said = setup(copy).stderr
    assert (copy / ".tools" / "uv" / "bin" / "uv").is_symlink() is taken
    assert ("bringing uv" in said) is not taken
    assert "bringing uv" not in setup(copy).stderr


def test_a_uv_that_was_removed_meanwhile_is_brought(copy: Path) -> None:
    (copy / ".tools" / "uv" / "bin").mkdir(parents=True)
    (copy / ".tools" / "uv" / "bin" / "uv").symlink_to(copy / "gone")
    setup(copy)
    assert (copy / ".tools" / "uv" / "bin" / "uv").read_text() == "brought\n"


@pytest.mark.parametrize(("words", "extra"), [([], "gpu"), (["EXTRA=cpu"], "cpu")])
def test_what_was_made_for_gpus_stays_so(tmp_path: Path, words: list[str], extra: str) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "uv.lock"):
        (tmp_path / name).touch()
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".extra").write_text("gpu")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "EXTRA"))}
    done = subprocess.run(
        ["make", "-n", "sync", *words], cwd=tmp_path, env=clean, capture_output=True, text=True, check=True
    )
    assert f"EXTRA={extra} scripts/sync.sh" in done.stdout
