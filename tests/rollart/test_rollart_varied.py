"""Groups that teach nothing are dropped, and not for ever in silence."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from rollart.pipeline.varied import Varied


def group(*rewards: float) -> Any:
    return SimpleNamespace(samples=[SimpleNamespace(reward=reward) for reward in rewards])


def test_only_groups_whose_rewards_differ_are_kept() -> None:
    keep = Varied(10)
    assert keep(group(0.0, 1.0, 0.0))
    assert not keep(group(0.0, 0.0))
    assert not keep(group(1.0, 1.0))


def test_a_run_of_drops_is_told_each_time_the_patience_ends(caplog: pytest.LogCaptureFixture) -> None:
    keep = Varied(3)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            keep(group(0.0, 0.0))
        assert [record.getMessage().split(" groups")[0] for record in caplog.records] == ["3"]
        keep(group(0.0, 1.0))
        for _ in range(2):
            keep(group(0.0, 0.0))
        assert len(caplog.records) == 1
        keep(group(0.5, 0.5))
    assert "all 0.5" in caplog.records[-1].getMessage()
