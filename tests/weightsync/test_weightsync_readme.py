"""The README's example runs, and the base package needs none of the large libraries."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import weightsync

README = Path(__file__).parents[2] / "packages/weightsync/README.md"


@pytest.mark.real
def test_the_example_runs_without_torch() -> None:
    code = README.read_text().split("```python\n")[1].split("```")[0]
    banned = "import sys; sys.modules.update(dict.fromkeys(('torch', 'vllm', 'mooncake', 'ray')))\n"
    done = subprocess.run([sys.executable, "-c", banned + code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and lines[0].endswith("sent 4004032 of 4004032 bytes"), lines


def test_everything_that_is_exported_exists() -> None:
    assert all(hasattr(weightsync, name) for name in weightsync.__all__)
    assert len(set(weightsync.__all__)) == len(weightsync.__all__)
