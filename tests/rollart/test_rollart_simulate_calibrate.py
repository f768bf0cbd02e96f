"""A world that is fitted to a run takes as long as that run did, for other settings too."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rollart.cli.main import main
from rollart.errors import RunMissing
from rollart.runtime.folder import RunFolder
from rollart.simulate.calibrate import calibrate
from rollart.simulate.config import load_simulation, make_simulation
from rollart.simulate.lines import fit_line
from rollart.simulate.run import simulate
from rollart.simulate.summary import Summary, summarize

ROOT = Path(__file__).resolve().parents[2]
LESS = ["run.iterations=7", "buffer.batch_groups=6", "rollout.concurrency=64", "eval.episodes=8", "eval.every=1000"]
OTHER = ["buffer.batch_groups=3", "rollout.concurrency=24"]


@given(st.floats(0, 10), st.floats(0, 10), st.lists(st.floats(1, 100), min_size=2, max_size=20, unique=True))
def test_points_of_a_line_give_the_line(start: float, slope: float, xs: list[float]) -> None:
    line = fit_line([(x, start + slope * x) for x in xs])
    assert all(line.start + line.slope * x == pytest.approx(start + slope * x, rel=1e-3, abs=1e-3) for x in xs)


@given(st.lists(st.tuples(st.floats(1, 100), st.floats(0, 100)), min_size=2, max_size=20))
def test_a_fit_is_never_negative(points: list[tuple[float, float]]) -> None:
    line = fit_line(points)
    assert line.start >= 0 and line.slope >= 0


def run(folder: Path, words: list[str], config: Path) -> Summary:
    simulation = load_simulation(config, [f"run.folder={folder.parent}", f"run.name={folder.name}", *words])
    place = RunFolder.of(simulation.config)
    place.create(simulation.config)
    try:
        return summarize(simulation, simulate(simulation, place))
    finally:
        place.close()


def test_a_fitted_world_predicts_settings_that_it_has_not_seen(tmp_path: Path) -> None:
    """The run that is fitted to is itself simulated here, so that what it would do otherwise is known."""
    lake = ROOT / "examples" / "frozenlake.yaml"
    run(tmp_path / "real", LESS, lake)
    truth = run(tmp_path / "other", [*LESS, *OTHER], lake)
    fitted = tmp_path / "fitted.yaml"
    fitted.write_text(yaml.safe_dump(calibrate(tmp_path / "real")))
    predicted = run(tmp_path / "predicted", OTHER, fitted)
    assert predicted.step_s == pytest.approx(truth.step_s, rel=0.25)


def test_cores_that_all_share_are_fitted_from_their_cpu_seconds(tmp_path: Path) -> None:
    """Fitted beside a trainer, a world also tells how long a mode takes in which nothing runs beside it."""
    lake = ROOT / "examples" / "frozenlake.yaml"
    shared = [
        *LESS,
        "simulate.host={cores: 2, turn_s: 0.0004}",
        "simulate.training={hardware: cpu, gpus: 1, step_s: 0.2}",
    ]
    run(tmp_path / "real", shared, lake)
    tree = calibrate(tmp_path / "real")
    assert tree["simulate"]["host"] == {"cores": 2, "turn_s": pytest.approx(0.0004, rel=0.05)}
    fitted = tmp_path / "fitted.yaml"
    fitted.write_text(yaml.safe_dump(tree))
    for number, words in enumerate((OTHER, ["run.mode=sync_plus", "buffer.alpha=0"], ["rollout.concurrency=128"])):
        truth = run(tmp_path / f"other-{number}", [*shared, *words], lake)
        predicted = run(tmp_path / f"predicted-{number}", words, fitted)
        assert predicted.step_s == pytest.approx(truth.step_s, rel=0.25), words


def test_the_command_writes_the_world_beside_the_run(tmp_path: Path) -> None:
    run(tmp_path / "real", [*LESS, "run.iterations=5"], ROOT / "examples" / "frozenlake.yaml")
    assert main(["simulate", "--calibrate", str(tmp_path / "real"), "run.iterations=3"]) == 0
    written = make_simulation(yaml.safe_load((tmp_path / "real" / "calibrated.yaml").read_text()))
    assert written.fleets[0].hardware == "fitted"
    assert (tmp_path / "real-simulated" / "metrics.jsonl").exists()


def test_a_short_run_cannot_be_fitted(tmp_path: Path) -> None:
    run(tmp_path / "real", [*LESS, "run.iterations=2"], ROOT / "examples" / "frozenlake.yaml")
    with pytest.raises(RunMissing, match="a fit needs 3"):
        calibrate(tmp_path / "real")
