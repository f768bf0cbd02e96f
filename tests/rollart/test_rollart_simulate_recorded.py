"""A file of episodes takes the place of a profile's distributions, and says where it cannot be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollart.errors import ConfigError
from rollart.runtime.folder import RunFolder
from rollart.simulate.config import Simulation, make_simulation
from rollart.simulate.recorded import read_episodes
from rollart.simulate.run import simulate

EPISODES = """\
{"turns": [[30, 5, 1.5], [31, 6, 2.5]], "reset_s": 1.0, "reward": 0.75}

{"turns": [[40, 10, 2.0]], "reward": 1}
"""


def written(folder: Path, text: str) -> str:
    path = folder / "episodes.jsonl"
    path.write_text(text)
    return str(path)


def simulation(trace: str, **world: Any) -> Simulation:
    given: dict[str, Any] = {
        "model": "qwen3-8b",
        "generation": [{"hardware": "H800", "gpus": 4}],
        "training": {"hardware": "H800", "gpus": 2},
        "tasks": {"T": {"trace": trace}},
    }
    return make_simulation(
        {
            "run": {"iterations": 3},
            "tasks": {"T": {"kind": "env", "env": "sim:t"}},
            "generation": {"max_model_len": 1024},
            "buffer": {"batch_groups": 4, "group_size": 2, "drop_uniform": False},
            "eval": {"episodes": 1},
            "simulate": given | world,
        }
    )


def test_a_profile_is_what_its_episodes_say(tmp_path: Path) -> None:
    profile = simulation(written(tmp_path, EPISODES)).profiles["T"]
    assert (profile.turns.average, profile.prompt.average, profile.observation.average) == (1.5, 35, 31)
    assert (profile.response.average, profile.step_s.average, profile.reset_s.average) == (7, 2, 0.5)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "holds no episodes"),
        (EPISODES + '{"turns": []}\n', "line 4: Expected `array` of length >= 1"),
        ('{"turns": [[30, 5, -1.0]]}\n', "line 1: Expected `float` >= 0"),
        ('{"turns": [[30, 5]]}\n', "line 1: .*length 3"),
        ('{"turns": [[30, 5, 1]], "rewards": 1}\n', "line 1: .*unknown field `rewards`"),
        ("turns\n", "line 1: JSON is malformed"),
    ],
)
def test_what_cannot_be_played_is_refused_by_its_line(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=told):
        simulation(written(tmp_path, text))


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_episodes(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("placement", ["trajectory", "group"])
def test_a_run_of_recorded_episodes_uses_all_engines(tmp_path: Path, placement: str) -> None:
    subject = simulation(written(tmp_path, EPISODES), placement=placement)
    folder = RunFolder(tmp_path / "run")
    folder.create(subject.config)
    try:
        simulated = simulate(subject, folder)
    finally:
        folder.close()
    assert len(simulated.rows) == 3
    assert {float(row["reward/mean"] or 0) for row in simulated.rows} <= {0.75 + n / 32 for n in range(9)}
    trace = (tmp_path / "run" / "trace.json").read_text()
    assert all(f"gen-H800-{number}" in trace for number in range(4))
