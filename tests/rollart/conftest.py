"""What every test of the trainer leaves as it found it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

QUIETED = (None, "llmproxy", "envmanager", "samplebuffer", "weightsync", "rollart")


@pytest.fixture(autouse=True)
def _log_levels() -> Iterator[None]:
    """Commands and tests that quieten a logger do so for themselves."""
    before = {name: logging.getLogger(name).level for name in QUIETED}
    yield
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)
