"""The data files say what their sources say."""

from __future__ import annotations

import pytest

from rollart.errors import ConfigError
from rollart.simulate.catalog import GIB, builtin


@pytest.mark.parametrize(("model", "gib"), [("qwen3-8b", 15.26), ("qwen3-14b", 27.51), ("qwen3-32b", 61.02)])
def test_models_are_as_large_as_published(model: str, gib: float) -> None:
    assert builtin().shape(model).parameters * 2 / GIB == pytest.approx(gib, rel=1e-3)


def test_devices_are_those_of_the_paper() -> None:
    h20, h800 = builtin().device("H20"), builtin().device("H800")
    assert (h20.tflops, h20.memory_gb, h20.bandwidth_tbs) == (148, 96, 4.0)
    assert (h800.tflops, h800.memory_gb, h800.bandwidth_tbs) == (989.5, 80, 3.35)
    assert h800.cost / h20.cost == pytest.approx(2.85)


def test_trajectories_of_every_profile_fit_the_context() -> None:
    for name, profile in builtin().tasks.items():
        turns = profile.turns.average
        if profile.latest_only:
            continue
        tokens = profile.prompt.average + turns * (profile.observation.average + profile.response.average)
        assert tokens < 32_768, name


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"H900.*H20, H800"):
        builtin().device("H900")
