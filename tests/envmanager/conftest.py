"""Puts the repository root on the path, so that the tests here share `tests.envmanager.fakes`."""

import sys
from pathlib import Path

ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)
