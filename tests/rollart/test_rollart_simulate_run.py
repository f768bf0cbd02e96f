"""Whole simulated runs: they end, keep their invariants, repeat themselves exactly, and survive faults."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollart.errors import ConfigError
from rollart.observe.trace import read_trace
from rollart.report import write_report
from rollart.runtime.folder import RunFolder
from rollart.simulate.config import make_simulation
from rollart.simulate.errors import Broken
from rollart.simulate.run import Simulated, check_rows, simulate


def tree(mode: str = "rollart", **simulate: Any) -> dict[str, Any]:
    """Two tasks on six devices, a second of CPU time or less."""
    return {
        "run": {"name": "small", "mode": mode, "iterations": 3},
        "tasks": {
            "Math": {"kind": "env", "env": "sim:math", "max_tokens": 2048, "max_turns": 3},
            "Shop": {"kind": "env", "env": "sim:shop", "max_tokens": 512, "max_turns": 6},
        },
        "generation": {"max_model_len": 16384},
        "buffer": {
            "batch_groups": 2,
            "group_size": 3,
            "alpha": 1.0 if mode in ("rollart", "areal") else 0.0,
            "drop_uniform": False,
        },
        "eval": {"every": 100, "episodes": 2},
        "checkpoint": {"every": 100},
        "simulate": {
            "model": "qwen3-8b",
            "generation": [{"hardware": "H800", "gpus": 2}, {"hardware": "H20", "gpus": 2}],
            "training": {"hardware": "H800", "gpus": 2},
            "tasks": {"Math": "gem-math", "Shop": "webshop"},
            **simulate,
        },
    }


def run(folder: Path, configuration: dict[str, Any]) -> Simulated:
    logging.getLogger("envmanager").setLevel(logging.CRITICAL)
    logging.getLogger("llmproxy").setLevel(logging.CRITICAL)
    simulation = make_simulation(configuration)
    place = RunFolder(folder)
    place.create(simulation.config)
    try:
        return simulate(simulation, place)
    finally:
        place.close()


def test_without_a_prefix_cache_the_same_run_takes_longer(tmp_path: Path) -> None:
    times = {caches: run(tmp_path / str(caches), tree(prefix_cache=caches)).elapsed_s for caches in (True, False)}
    assert times[False] > 1.01 * times[True]


@pytest.mark.parametrize("mode", ["rollart", "areal", "one_off", "sync_plus", "sync"])
def test_every_mode_runs_to_its_end_with_the_invariants_kept(tmp_path: Path, mode: str) -> None:
    simulated = run(tmp_path / "run", tree(mode))
    assert [row["step"] for row in simulated.rows] == [1, 2, 3]
    assert simulated.turns > 0
    assert all(0 < used <= 1 for used in simulated.generation_used.values())


def test_it_leaves_what_a_real_run_leaves(tmp_path: Path) -> None:
    run(tmp_path / "run", tree())
    resources = {str(event.args["name"]) for event in read_trace(tmp_path / "run" / "trace.json") if event.ph == "M"
                 and event.name == "process_name"}  # fmt: skip
    assert {"iterations", "controller", "train", "env", "gen-H800-0", "push", "pull"} <= resources
    assert "small" in write_report([tmp_path / "run"]).read_text()


@pytest.mark.parametrize("mode", ["rollart", "sync_plus"])
def test_the_same_seed_gives_the_same_rows_and_another_one_others(tmp_path: Path, mode: str) -> None:
    first, again = (run(tmp_path / name, tree(mode)) for name in ("first", "again"))
    assert first.rows == again.rows
    other = tree(mode)
    other["run"]["seed"] = 1
    assert run(tmp_path / "other", other).rows != first.rows


AGAIN = """
import sys
from pathlib import Path
import msgspec
import test_rollart_simulate_run as test
storm = {"kind": "environments", "at": 5.0, "for_s": 60.0, "factor": 0.5}
rows = test.run(Path(sys.argv[1]), test.tree(faults=[storm, {"kind": "node", "at": 40.0, "for_s": 50.0}])).rows
sys.stdout.buffer.write(msgspec.json.encode(rows))
"""


@pytest.mark.seconds
def test_another_process_with_other_hashes_gives_the_same_rows(tmp_path: Path) -> None:
    def told(seed: str) -> bytes:
        command = [sys.executable, "-c", AGAIN, str(tmp_path / seed)]
        hashes = os.environ | {"PYTHONHASHSEED": seed}
        return subprocess.check_output(command, env=hashes, cwd=Path(__file__).parent)

    assert told("1") == told("2") != b""


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "node", "at": 40.0, "for_s": 100.0},
        {"kind": "freeze", "at": 40.0, "for_s": 100.0},
        {"kind": "link", "at": 10.0, "for_s": 300.0, "factor": 0.1},
        {"kind": "environments", "at": 5.0, "for_s": 60.0, "factor": 0.8, "slow": 3.0},
    ],
)
def test_faults_cost_time_and_break_nothing(tmp_path: Path, fault: dict[str, Any]) -> None:
    plain = run(tmp_path / "plain", tree())
    hit = run(tmp_path / "hit", tree(faults=[fault]))
    assert hit.elapsed_s > 0.9 * plain.elapsed_s
    assert len(hit.rows) == 3


def test_prefill_and_decode_apart(tmp_path: Path) -> None:
    fleets = [
        {"hardware": "H800", "gpus": 2, "role": "prefill"},
        {"hardware": "H20", "gpus": 2, "role": "decode"},
    ]
    simulated = run(tmp_path / "run", tree(generation=fleets))
    assert set(simulated.generation_used) == {"H800", "H20"}


def test_a_broken_ledger_is_found(tmp_path: Path) -> None:
    simulation = make_simulation(tree())
    rows = run(tmp_path / "run", tree()).rows
    rows[1]["ledger/running"] = 10**6
    with pytest.raises(Broken, match="ledger of step 2"):
        check_rows(simulation, rows)
    with pytest.raises(Broken, match="2 of 3"):
        check_rows(simulation, rows[:2])


def test_a_model_that_does_not_fit_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="raise tensor_parallel"):
        run(tmp_path / "run", tree(model="qwen3-235b-a22b"))
