"""The example is what it says, and short."""

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
    assert [line for line in ran.stdout.splitlines() if line] == ["H800 cpu ['b', 'b']", "moved to H800"]
