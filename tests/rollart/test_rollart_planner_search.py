"""The planner simulates what it proposes, compares it with what was given, and writes what can be run."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import yaml
from msgspec.structs import replace

from rollart.cli.main import main
from rollart.cli.plan import parse_classes, parse_gpus
from rollart.errors import ConfigError
from rollart.planner.candidate import Candidate, Part, steps_between
from rollart.planner.estimate import demand_of, estimate
from rollart.planner.judge import Judged, judge
from rollart.planner.search import (
    Search,
    _spread,
    affinities,
    beside,
    candidates,
    fleets_within,
    given_candidate,
)
from rollart.simulate.catalog import builtin
from rollart.simulate.config import load_simulation, make_simulation
from rollart.simulate.errors import Broken
from rollart.simulate.run import Simulated
from rollart.simulate.summary import Summary

pytestmark = pytest.mark.seconds

TREE: dict[str, Any] = {
    "run": {"name": "planned", "iterations": 3},
    "tasks": {
        "Math": {"kind": "env", "env": "sim:math", "max_tokens": 2048, "max_turns": 3},
        "Lake": {"kind": "env", "env": "sim:lake", "max_tokens": 64, "max_turns": 12},
    },
    "generation": {"max_model_len": 16384},
    "buffer": {"batch_groups": 4, "group_size": 4, "alpha": 1.0, "drop_uniform": False},
    "eval": {"every": 100, "episodes": 2},
    "checkpoint": {"every": 100},
    "simulate": {
        "model": "qwen3-8b",
        "generation": [{"hardware": "H800", "gpus": 8}, {"hardware": "H20", "gpus": 8}],
        "training": {"hardware": "H800", "gpus": 16},
        "tasks": {"Math": "gem-math", "Lake": "frozenlake"},
    },
}
GPUS = {"H800": 24, "H20": 8}


def test_every_candidate_uses_the_devices_and_can_be_simulated() -> None:
    given = make_simulation(TREE)
    found = list(candidates(given, GPUS, (1.0, 2.0)))
    assert len(found) == len(set(found)) > 10
    for candidate in found:
        assert make_simulation(candidate.tree(TREE)).gpus == GPUS


def test_engines_of_several_widths_and_contexts_computed_apart_are_tried() -> None:
    found = list(candidates(make_simulation(TREE), GPUS, (1.0,)))
    widths = {part.tensor_parallel for one in found for part in one.generation}
    roles = {tuple(part.role for part in one.generation) for one in found}
    assert widths == {1, 2, 4} and roles == {("both",), ("both", "both"), ("prefill", "decode")}
    alone = [one for one in candidates(make_simulation(TREE), {"H800": 40}, (1.0,)) if len(one.generation) == 2]
    cuts = {tuple((part.role, part.gpus) for part in one.generation) for one in alone}
    assert (("prefill", 8), ("decode", 24)) in cuts and (("prefill", 16), ("decode", 16)) in cuts


def test_without_a_prefix_cache_each_turn_computes_all_before_it() -> None:
    profile = builtin().profile("swe-bench")
    with_cache, without = (demand_of(profile, 65_536, caches) for caches in (True, False))
    first, later, reply = profile.prompt.average, profile.observation.average, profile.response.average
    turns = with_cache.turns
    contexts = [first + turn * (later + reply) for turn in range(round(turns))]
    assert without.computed == pytest.approx(sum(contexts), rel=0.05)
    assert with_cache.computed == pytest.approx(first + (turns - 1) * later)
    tree = {**TREE, "simulate": {**TREE["simulate"], "prefix_cache": False}}
    assert estimate(make_simulation(tree)).generate > estimate(make_simulation(TREE)).generate


@pytest.mark.parametrize("mode", ["rollart", "areal", "sync_plus"])
@pytest.mark.parametrize("trains", [4, 16])
def test_the_closed_form_is_not_far_from_the_simulation(mode: str, trains: int) -> None:
    logging.getLogger().setLevel(logging.CRITICAL)
    tree = TREE | {"run": TREE["run"] | {"mode": mode}, "rollout": {"concurrency": 64}}
    tree["buffer"] = TREE["buffer"] | {"batch_groups": 16, "alpha": 0.0 if mode == "sync_plus" else 1.0}
    tree["simulate"] = TREE["simulate"] | {"training": {"hardware": "H800", "gpus": trains}}
    judged = judge(tree, given_candidate(make_simulation(tree)), 7)
    assert judged.estimated_s == pytest.approx(judged.summary.step_s, rel=0.3)


def test_splits_of_a_large_fleet_differ_by_a_share_of_it() -> None:
    shares = [
        sorted({one.training.gpus for one in candidates(make_simulation(TREE), {"H800": gpus}, (1.0,))})
        for gpus in (64, 3008)
    ]
    assert shares[0] == list(range(8, 64, 8))
    assert 40 <= len(shares[1]) <= 48 and {b - a for a, b in zip(shares[1], shares[1][1:], strict=False)} == {64}


def test_those_that_are_simulated_first_are_not_all_alike() -> None:
    ranked = [Candidate((Part("H800", 3008 - gpus, 8),), Part("H800", gpus)) for gpus in range(840, 1480, 64)]
    first = [one.training.gpus for one in _spread(ranked, 4)]
    assert len(first) == 4 and first[0] == 840 and first[-1] >= 840 * 1.15**2.5
    few = [Candidate((Part("H800", 64 - gpus, 8),), Part("H800", gpus)) for gpus in (24, 16, 32)]
    assert _spread(few, 3) == few


def test_beside_a_split_lie_the_next_smaller_and_larger() -> None:
    field = list(candidates(make_simulation(TREE), {"H800": 64}, (1.0, 2.0)))
    one = Candidate((Part("H800", 40, 2),), Part("H800", 24), (), 2.0)
    assert beside(one, field) == [
        replace(one, generation=(Part("H800", 64 - gpus, 2),), training=Part("H800", gpus)) for gpus in (16, 32)
    ]
    least = Candidate((Part("H800", 56, 2),), Part("H800", 8))
    assert [other.training.gpus for other in beside(least, field)] == [16]
    assert beside(replace(one, generation=(Part("H800", 48, 2),)), field) == []  # other devices


def test_as_many_trainers_push_for_each_device_as_in_the_file() -> None:
    tree = {**TREE, "simulate": {**TREE["simulate"], "training": {"hardware": "H800", "gpus": 16, "push_streams": 2}}}
    start = given_candidate(make_simulation(tree))
    for gpus, streams in ((32, 4), (16, 2), (8, 1)):
        split = Candidate(start.generation, Part("H800", gpus))
        assert make_simulation(split.tree(tree)).training.push_streams == streams


def test_a_class_may_train_as_a_whole_while_another_generates() -> None:
    given = make_simulation(TREE)
    found = list(candidates(given, {"H800": 8, "H20": 8}, (1.0,)))
    assert found and {one.training for one in found} == {Part("H800", 8)}
    assert {part.hardware for one in found for part in one.generation} == {"H20"}
    assert not list(candidates(given, {"H800": 8}, (1.0,)))


def test_environments_that_the_file_counts_stay_as_many() -> None:
    counted = TREE | {"rollout": {"concurrency": 12}}
    candidate = Candidate((Part("H800", 8),), Part("H800", 16), alpha=3.0)
    assert make_simulation(candidate.tree(counted)).config.rollout.concurrency == 12
    assert make_simulation(candidate.tree(TREE)).config.rollout.concurrency == 64


def test_the_decode_heavy_task_moves_first() -> None:
    moved = affinities(make_simulation(TREE), [Part("H800", 8), Part("H20", 8)])
    assert moved == [(), (("Lake", "H800"), ("Math", "H20"))]


def test_the_configuration_itself_is_a_candidate_that_changes_nothing() -> None:
    given = make_simulation(TREE)
    again = make_simulation(given_candidate(given).tree(TREE))
    assert again.config == given.config
    assert (again.fleets, again.gpus) == (given.fleets, given.gpus)


def test_more_devices_never_make_an_estimate_longer() -> None:
    steps = []
    for gpus in (8, 16, 32, 64):
        tree = msgspec.json.decode(msgspec.json.encode(TREE))
        tree["simulate"]["generation"] = [{"hardware": "H800", "gpus": gpus}]
        steps.append(estimate(make_simulation(tree)).step)
    assert steps == sorted(steps, reverse=True)


def test_one_decision_after_the_other_leads_from_start_to_end() -> None:
    start = Candidate((Part("H800", 8),), Part("H800", 16))
    end = Candidate((Part("H800", 16),), Part("H800", 8), alpha=2.0, spare_groups=1)
    steps = steps_between(start, end)
    assert [name for name, _ in steps] == ["split", "alpha", "redundancy"]
    assert steps[-1][1] == end
    apart = Candidate((Part("H800", 8, role="prefill"), Part("H20", 8, 2, "decode")), Part("H800", 16))
    whole = Candidate((Part("H800", 8), Part("H20", 8)), Part("H800", 16))
    assert [name for name, _ in steps_between(whole, apart)] == ["tensor parallel, prefill apart"]


def test_budgets_are_spent_and_not_passed() -> None:
    catalog = builtin()
    for fleet in fleets_within(catalog, ["H800", "H20"], 300.0):
        assert 285 <= sum(catalog.device(name).cost * count for name, count in fleet.items()) <= 300


def test_a_budget_is_spent_on_the_classes_that_are_named(tmp_path: Path) -> None:
    config, out = tmp_path / "given.yaml", tmp_path / "planned.yaml"
    config.write_text(yaml.safe_dump(TREE))
    words = ["plan", str(config), "--cost", "62", "--classes", "h800,h20", "--out", str(out), "--quick"]
    assert main(words) == 0
    assert 0.95 * 62 <= load_simulation(out).cost <= 62
    with pytest.raises(ConfigError, match="give some of"):
        parse_classes("h900", builtin().hardware)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--cost", "1"], "no pairs of nodes of H800, H20 cost that much"),
        (["--cost", "0"], "give a budget above 0"),
        (["--cost", "nan"], "give a budget above 0"),
        (["--cost", "1e7"], "mixtures to look at; give less"),
        (["--cost", "62", "--processes", "-1"], "--processes = -1"),
        (["--cost", "62", "--out", "nowhere/planned.yaml"], "name a file in a folder"),
        (["--cost", "62", "--out", "."], "name a file in a folder"),
        (["--gpus", "h800=16"], "--classes = 'h800,h20': goes with --cost"),
    ],
)
def test_what_is_asked_for_in_vain_is_told_at_once(
    words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(TREE), encoding="utf-8")
    assert main(["plan", str(path), *words, "--classes", "h800,h20"]) == 2
    assert told in capsys.readouterr().err


def test_devices_are_written_as_class_and_count() -> None:
    assert parse_gpus("h800=96,H20=32", builtin().hardware) == {"H800": 96, "H20": 32}
    with pytest.raises(ConfigError, match="write CLASS=COUNT"):
        parse_gpus("h900=4", builtin().hardware)
    with pytest.raises(ConfigError, match="names a class again"):
        parse_gpus("h800=4,h800=8", builtin().hardware)


def test_the_best_was_simulated_and_beats_or_is_the_given() -> None:
    logging.getLogger().setLevel(logging.CRITICAL)
    plan = Search(TREE, width=2, rounds=(3,)).plan([GPUS], keep=1)
    assert plan.start is not None
    assert plan.best[0].summary.step_s <= plan.start.summary.step_s
    assert plan.considered > plan.simulated >= 3 - 1


def pretend(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[Candidate], float], noise: float = 0.0) -> None:
    """Every simulation comes to so many seconds a step, which scatter."""
    random = Random(0)

    def judge(tree: Any, candidate: Candidate, iterations: int, by: int) -> Judged:
        true = seconds(candidate)
        steps = [true * random.gauss(1, noise) for _ in range(iterations)]
        mean = sum(steps) / iterations
        rest = dict.fromkeys(("tokens_per_s", "cost", "staleness", "stale", "push_s", "pull_s", "exposed_s"), 1.0)
        summary = Summary(first=1, counted=iterations, step_s=mean, steps=steps, parts={}, **rest)
        simulated = Simulated(
            rows=[], elapsed_s=1.0, generation_used={}, training_used=0.0, rewards_used=None, turns=0, preemptions=0
        )
        return Judged(candidate, by, mean, summary, simulated)

    monkeypatch.setattr("rollart.planner.judge.judge", judge)


def test_noise_replaces_nothing_that_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, lambda candidate: 100.0, noise=0.05)
    search = Search(TREE, width=6, rounds=(4, 8))
    plan = search.plan([GPUS])
    assert plan.start is not None and plan.best[0] == plan.start and plan.steps == []
    assert 0.02 < plan.margin < 0.1
    assert plan.simulated <= 6 + 1 + 2 + 4  # and it is no reason to climb


def test_what_is_better_by_more_than_noise_is_climbed_to(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = {"H800": 128}
    pretend(monkeypatch, lambda candidate: 100.0 + abs(candidate.training.gpus - 104), noise=0.005)
    plan = Search(TREE, width=2, rounds=(4,)).plan([gpus])
    assert abs(plan.best[0].candidate.training.gpus - 104) <= 8


def test_alpha_and_redundancy_are_tried_beside_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(candidate: Candidate) -> float:
        return 100.0 - 10 * candidate.alpha - 5 * candidate.spare_groups - 5 * candidate.spare_members

    pretend(monkeypatch, seconds)
    best = Search(TREE, width=1, rounds=(3,)).plan([GPUS]).best[0].candidate
    assert (best.alpha, best.spare_groups, best.spare_members) == (2.0, 1, 1)


def test_an_interrupted_search_writes_the_best_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, out = tmp_path / "given.yaml", tmp_path / "planned.yaml"
    config.write_text(yaml.safe_dump(TREE))
    steps = iter((90.0, 80.0))

    def seconds(candidate: Candidate) -> float:
        if (step := next(steps, None)) is None:
            raise KeyboardInterrupt
        return step

    pretend(monkeypatch, seconds)
    words = ["plan", str(config), "--gpus", "h800=24,h20=8", "--out", str(out), "--processes", "1"]
    assert main(words) == 130
    told = capsys.readouterr().out
    assert "interrupted; the best so far" in told and "2 simulated" in told
    assert load_simulation(out).gpus == GPUS


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_both_signals_end_a_search_before_anything_is_known(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, out = tmp_path / "given.yaml", tmp_path / "planned.yaml"
    config.write_text(yaml.safe_dump(TREE))
    before = signal.getsignal(signal.SIGTERM)

    def told(candidate: Candidate) -> float:
        signal.raise_signal(number)
        return 1.0

    pretend(monkeypatch, told)
    words = ["plan", str(config), "--gpus", "h800=24,h20=8", "--out", str(out), "--processes", "1"]
    assert main(words) == 130
    assert "interrupted; nothing was simulated before" in capsys.readouterr().out
    assert not out.exists() and signal.getsignal(signal.SIGTERM) is before


def test_candidates_that_fail_are_left_out_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, out = tmp_path / "given.yaml", tmp_path / "planned.yaml"
    config.write_text(yaml.safe_dump(TREE))

    def seconds(candidate: Candidate) -> float:
        if candidate.training.gpus == 8:
            raise Broken("[the ledger] does not balance")
        return 90.0

    pretend(monkeypatch, seconds)
    words = ["plan", str(config), "--gpus", "h800=24,h20=8", "--out", str(out), "--processes", "1"]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "failed           8 H800 train" in told and "Broken: [the ledger] does not balance" in told
    assert " simulated, " in told and " failed\n" in told
    assert load_simulation(out).training.gpus == 16


def test_what_was_given_and_fails_is_compared_with_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    given = given_candidate(make_simulation(TREE))

    def seconds(candidate: Candidate) -> float:
        if candidate == given:
            raise Broken("it stalled")
        return 90.0

    pretend(monkeypatch, seconds)
    plan = Search(TREE, width=3, rounds=(3,)).plan([GPUS])
    assert plan.start is None and plan.steps == [] and plan.failed == 1


def test_a_search_in_which_all_fail_says_why_the_first_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, out = tmp_path / "given.yaml", tmp_path / "planned.yaml"
    config.write_text(yaml.safe_dump(TREE))
    pretend(monkeypatch, lambda candidate: next(iter(())))
    words = ["plan", str(config), "--gpus", "h800=24,h20=8", "--out", str(out), "--processes", "1"]
    assert main(words) == 1
    told = capsys.readouterr().out
    assert "simulations came to its end; the first: StopIteration" in told and not out.exists()


def test_a_given_setting_that_holds_no_model_is_compared_with_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, lambda candidate: 100.0)
    large = TREE | {"simulate": TREE["simulate"] | {"model": "qwen3-235b-a22b"}}
    plan = Search(large, width=2, rounds=(3,)).plan([GPUS])
    assert plan.start is None and plan.best[0].candidate.generation[0].tensor_parallel == 8


@pytest.mark.parametrize("mode", ["sync", "sync_plus", "one_off"])
def test_modes_whose_batch_has_one_version_keep_their_alpha(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    pretend(monkeypatch, lambda candidate: 100.0)
    words = {"run": TREE["run"] | {"mode": mode}, "buffer": TREE["buffer"] | {"alpha": 0.0}}
    plan = Search(TREE | words, width=4, rounds=(3,)).plan([GPUS])
    assert {one.candidate.alpha for one in plan.best} == {0.0}


def test_devices_that_score_stand_beside_those_that_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, lambda candidate: 100.0)
    judges = {"rewards": {"kind": "dedicated", "hardware": "H800", "gpus": 2}}
    assert Search(TREE | {"simulate": TREE["simulate"] | judges}, width=1, rounds=(3,)).plan([GPUS]).start is not None


def test_devices_that_are_shared_are_no_candidate_to_compare_with(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, lambda candidate: 100.0)
    world = {
        "generation": [{"hardware": "H800", "gpus": 16}],
        "training": {"hardware": "H800", "gpus": 16, "shared": True},
    }
    shared = TREE | {"simulate": TREE["simulate"] | world, "run": TREE["run"] | {"mode": "sync_plus"}}
    shared["buffer"] = TREE["buffer"] | {"alpha": 0.0}
    assert Search(shared, width=1, rounds=(3,)).plan([{"H800": 32}]).start is None


def test_what_cannot_hold_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="leaves others that hold the model"):
        Search(TREE).plan([{"H800": 8}])


def test_the_command_writes_a_configuration_that_can_be_simulated(tmp_path: Path) -> None:
    config, out = tmp_path / "given.yaml", tmp_path / "planned.yaml"
    config.write_text(yaml.safe_dump(TREE))
    assert main(["plan", str(config), "--gpus", "h800=24,h20=8", "--out", str(out), "--quick"]) == 0
    assert load_simulation(out).gpus == GPUS
