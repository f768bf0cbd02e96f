"""The example is what it says, and short."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")

EXAMPLE = Path(__file__).parents[2] / "examples/resmgr_two_ray_actors.py"


@pytest.mark.real
@pytest.mark.timeout(200)
def test_two_actors_are_placed_with_fallback_and_one_moves() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 30
    ran = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=180)
    assert ran.returncode == 0, ran.stderr
    actors, moved = [line for line in ran.stdout.splitlines() if line]
    assert re.fullmatch(r"\[.*'H800': 1.0.*, .*'CPU': 1.0.*\]", actors)
    assert "hardware='H800', fell_back=False" in moved
