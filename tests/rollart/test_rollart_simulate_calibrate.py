"""A world that is fitted to a run takes as long as that run did, for other settings too."""

from __future__ import annotations

import json
import shutil
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

pytestmark = pytest.mark.seconds

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


def test_a_run_without_an_evaluation_before_training_is_fitted(tmp_path: Path) -> None:
    shared = ["simulate.host={cores: 2}", "simulate.training={hardware: cpu, gpus: 1, step_s: 0.2}"]
    run(tmp_path / "real", [*LESS, *shared], ROOT / "examples" / "frozenlake.yaml")
    trace = tmp_path / "real" / "trace.json"
    events = [json.loads(line.lstrip(",")) for line in trace.read_text().splitlines() if line.lstrip(",")[:1] == "{"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    first = min(event["ts"] for event in events if event["ph"] == "X" and names[event["pid"]] == "iterations")
    kept = [one for one in events if not (names[one["pid"]].startswith("gen") and one.get("ts", first) < first)]
    trace.write_text("[\n" + "\n,".join(map(json.dumps, kept)) + "\n]\n")
    assert len(kept) < len(events)
    assert calibrate(tmp_path / "real")["simulate"]["hardware"]["fitted"]["overhead_s"] > 0


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "real"
    run(folder, [*LESS, "run.iterations=5"], ROOT / "examples" / "frozenlake.yaml")
    return folder


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("trace.json", None, "tells of no iterations or turns"),
        ("trace.json", "[\n", "tells of no iterations or turns"),
        ("metrics.jsonl", "", "0 iterations after the first"),
        ("metrics.jsonl", "".join(f'{{"step": {step}}}\n' for step in range(1, 6)), "say nothing of trained_tokens"),
        ("config.yaml", None, "holds no run"),
    ],
)
def test_a_damaged_run_is_told(
    real: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str | None, told: str
) -> None:
    folder = Path(shutil.copytree(real, tmp_path / "copy"))
    (folder / name).unlink()
    if text is not None:
        (folder / name).write_text(text)
    assert main(["simulate", "--calibrate", str(folder)]) == 2
    assert told in capsys.readouterr().err
    assert not (folder / "calibrated.yaml").exists()


def test_what_keeps_a_fit_from_being_written_or_meant_is_told(
    real: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(real, tmp_path / "copy"))
    (folder / "calibrated.yaml").mkdir()
    assert main(["simulate", "--calibrate", str(folder)]) == 2
    assert "fit to a copy of the run" in capsys.readouterr().err
    assert main(["simulate", "other.yaml", "--calibrate", str(real)]) == 2
    assert "brings its own" in capsys.readouterr().err


def test_a_class_that_no_catalog_knows_can_be_fitted(real: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(real, tmp_path / "copy"))
    tree = yaml.safe_load((folder / "config.yaml").read_text())
    tree["generation"] |= {"hardware": ["mine"], "affinity": {"default": "mine"}}
    tree["pools"] = [{"name": "mine", "hardware": "mine", "total": 8}, *tree["pools"]]
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    assert calibrate(folder)["simulate"]["generation"][0]["hardware"] == "fitted"


def test_a_short_run_cannot_be_fitted(tmp_path: Path) -> None:
    run(tmp_path / "real", [*LESS, "run.iterations=2"], ROOT / "examples" / "frozenlake.yaml")
    with pytest.raises(RunMissing, match="a fit needs 3"):
        calibrate(tmp_path / "real")
