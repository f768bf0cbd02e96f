"""The program of docs/distributed.md runs as it is pasted, and prints what the manual says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

MANUAL = Path(__file__).parents[2] / "docs" / "distributed.md"


@pytest.mark.real
def test_the_program_prints_what_the_manual_says(tmp_path: Path) -> None:
    found = re.search(r"```python\n# roles\.py\n(.*?)```\n\n```\n(.*?)```", MANUAL.read_text(), re.DOTALL)
    assert found is not None
    (tmp_path / "roles.py").write_text(found[1])
    said = subprocess.run(
        [sys.executable, "roles.py"], cwd=tmp_path, check=True, capture_output=True, text=True, timeout=110
    )
    assert said.stdout == found[2]
