"""The search: every candidate is ranked by the closed form, the best are simulated, the better half of them longer.
Then the splits beside the best are, as long as one of them is better: to the closed form near splits are much alike.

Invariant: the configuration that is proposed was simulated, and so was the one that it is compared with
(tests/rollart/test_rollart_planner_search.py).
"""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from rollart.errors import ConfigError
from rollart.planner.candidate import Candidate, Part, steps_between
from rollart.planner.estimate import demand_of, engine_seconds, estimate
from rollart.runtime.folder import RunFolder
from rollart.simulate.build import speed_of
from rollart.simulate.catalog import Catalog
from rollart.simulate.config import FleetConfig, Simulation, make_simulation
from rollart.simulate.run import Simulated, simulate
from rollart.simulate.summary import Summary, summarize

_NODE = 8
_PARALLEL = (1, 2, 4, 8)
_SPLITS = 48
"""Splits that are tried, at most: those of larger fleets differ by a share of the fleet, not by a node."""
_WIDTHS = 3
_CONTEXTS = 2
"""Whole contexts that an engine must have room for."""


class Judged(Struct, frozen=True):
    """A candidate, what the closed form said of it, and what its simulation came to."""

    candidate: Candidate
    estimated_s: float
    summary: Summary
    simulated: Simulated


class Plan(Struct, frozen=True):
    """`best` first; `start` is the configuration as it was, where it fits the devices; `steps` lead from one to the
    other.
    """

    best: list[Judged]
    start: Judged | None
    steps: list[tuple[str, Judged]]
    considered: int
    simulated: int


class Search:
    """Plans for one configuration. `tell` hears what is being tried."""

    def __init__(
        self,
        tree: Mapping[str, Any],
        *,
        width: int = 10,
        rounds: Sequence[int] = (5, 8),
        alphas: Sequence[float] | None = None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`width` candidates are simulated in the first of `rounds`, which are numbers of iterations: the first fill
        empty queues and say little.
        """
        self._tree = tree
        self._width = width
        self._rounds = rounds
        self._tell = tell
        self._given = make_simulation(tree)
        alpha = self._given.config.buffer.alpha
        self._alphas = tuple(alphas) if alphas else tuple(dict.fromkeys((alpha, alpha + 1)))
        self._runs: dict[tuple[Candidate, int], Judged] = {}

    def plan(self, fleets: Sequence[Mapping[str, int]], keep: int = 3) -> Plan:
        """The best of all ways to use one of `fleets` (devices by class). Raises ConfigError when none works."""
        ranked = sorted(self._ranked(fleets), key=lambda item: item[0])
        if not ranked:
            raise ConfigError(
                "gpus", list(map(dict, fleets)), "no split of these devices holds the model on both sides"
            )
        start = given_candidate(self._given) if dict(self._given.gpus) in [dict(f) for f in fleets] else None
        field = _spread([candidate for _, candidate in ranked], self._width)
        if start is not None and start not in field:
            field.append(start)
        for number, iterations in enumerate(self._rounds):
            judged = sorted((self._judge(one, iterations) for one in field), key=lambda one: one.summary.step_s)
            field = [one.candidate for one in judged[: max(keep, len(judged) // 2)]]
            last = number == len(self._rounds) - 1
        assert last, "at least one round"
        judged = self._climb(judged, [candidate for _, candidate in ranked], self._rounds[-1])
        best = judged[:keep]
        first = self._judge(start, self._rounds[-1]) if start is not None else None
        steps = []
        if start is not None:
            between = steps_between(start, best[0].candidate)
            steps = [(name, self._judge(one, self._rounds[-1])) for name, one in between]
        return Plan(best, first, steps, len(ranked), len({one for one, _ in self._runs}))

    def _climb(self, judged: list[Judged], field: Sequence[Candidate], iterations: int) -> list[Judged]:
        """With the splits beside the best one, and so on until none of them is better; best first."""
        found = {one.candidate: one for one in judged}
        best = judged[0]
        while True:
            for candidate in beside(best.candidate, field):
                found[candidate] = self._judge(candidate, iterations)
            order = sorted(found.values(), key=lambda one: one.summary.step_s)
            if order[0] is best:
                return order
            best = order[0]

    def _judge(self, candidate: Candidate, iterations: int) -> Judged:
        key = (candidate, iterations)
        if key not in self._runs:
            tree = candidate.tree(self._tree)
            tree["run"] = {**tree.get("run", {}), "iterations": iterations}
            simulation = make_simulation(tree)
            with tempfile.TemporaryDirectory() as place:
                folder = RunFolder(Path(place) / "run")
                folder.create(simulation.config)
                try:
                    simulated = simulate(simulation, folder)
                finally:
                    folder.close()
            summary = summarize(simulation, simulated)
            self._tell(f"{summary.step_s:8.1f} s a step  {candidate.words}")
            self._runs[key] = Judged(candidate, estimate(simulation).step, summary, simulated)
        return self._runs[key]

    def _ranked(self, fleets: Sequence[Mapping[str, int]]) -> Iterator[tuple[float, Candidate]]:
        for gpus in fleets:
            for candidate in candidates(self._given, gpus, self._alphas):
                yield estimate(make_simulation(candidate.tree(self._tree))).step, candidate


def given_candidate(simulation: Simulation) -> Candidate:
    """The configuration itself as a candidate."""
    config, training = simulation.config, simulation.training
    affinity = {task: name for task, name in config.generation.affinity.items() if task != "default"}
    mixed = len({fleet.hardware for fleet in simulation.fleets}) > 1
    if mixed and config.generation.affinity["default"]:
        for task in config.tasks:
            affinity.setdefault(task, config.generation.affinity["default"])
    return Candidate(
        tuple(Part(fleet.hardware, fleet.gpus, fleet.tensor_parallel, fleet.role) for fleet in simulation.fleets),
        Part(training.hardware, training.gpus),
        tuple(sorted(affinity.items())) if mixed else (),
        config.buffer.alpha,
        config.buffer.spare_groups,
        config.buffer.spare_members,
    )


def candidates(given: Simulation, gpus: Mapping[str, int], alphas: Sequence[float]) -> Iterator[Candidate]:
    """Splits by whole nodes, engines of as few devices as hold the model or more, affinities in order of
    advantage, prefill apart, and redundancy.
    """
    catalog = given.catalog
    trains = max(gpus, key=lambda name: catalog.device(name).tflops)
    groups = given.config.buffer.batch_groups
    for share in range(_NODE, gpus[trains] + 1, _NODE * ceil(gpus[trains] / _NODE / _SPLITS)):
        if share == sum(gpus.values()):
            continue  # nothing would generate
        training = Part(trains, share)
        left = {name: count - (share if name == trains else 0) for name, count in gpus.items()}
        choices = [_parts(given, name, count) for name, count in left.items() if count]
        for fleet in itertools.product(*choices):
            for affinity, alpha in itertools.product(affinities(given, fleet), alphas):
                base = Candidate(fleet, training, affinity, alpha)
                yield base
                yield replace(base, spare_groups=max(1, groups // 16))
            for cut in prefill_apart(given, fleet):
                for alpha in alphas:
                    yield Candidate(cut, training, (), alpha)


def beside(candidate: Candidate, field: Sequence[Candidate]) -> list[Candidate]:
    """Those that differ from it only in the split: the next with fewer devices that train, and with more."""
    alike = [one for one in field if _but_split(one) == _but_split(candidate)]
    fewer = [one for one in alike if one.training.gpus < candidate.training.gpus]
    more = [one for one in alike if one.training.gpus > candidate.training.gpus]
    nearest = [max(fewer, key=lambda one: one.training.gpus)] if fewer else []
    return nearest + ([min(more, key=lambda one: one.training.gpus)] if more else [])


def _but_split(candidate: Candidate) -> tuple[object, ...]:
    gpus = Counter({candidate.training.hardware: candidate.training.gpus})
    for part in candidate.generation:
        gpus[part.hardware] += part.gpus
    engines = tuple(replace(part, gpus=0) for part in candidate.generation)
    return replace(candidate, generation=engines, training=replace(candidate.training, gpus=0)), gpus


def prefill_apart(given: Simulation, fleet: Sequence[Part]) -> Iterator[tuple[Part, ...]]:
    """The same devices with the contexts computed by some of them: by the class that is better at it, or by a quarter
    or half of the nodes of the only one.
    """
    if len(fleet) > 1:
        first = max(fleet, key=lambda part: given.catalog.device(part.hardware).tflops)
        yield tuple(replace(part, role="prefill" if part is first else "decode") for part in fleet)
        return
    for part, fraction in itertools.product(fleet, (0.25, 0.5)):
        taken = round(part.gpus * fraction / _NODE) * _NODE
        if 0 < taken < part.gpus:
            yield replace(part, gpus=taken, role="prefill"), replace(part, gpus=part.gpus - taken, role="decode")


def affinities(given: Simulation, fleet: Sequence[Part]) -> list[tuple[tuple[str, str], ...]]:
    """No affinity, then tasks sent to the second class one more at a time, those first that lose least there."""
    classes = list(dict.fromkeys(part.hardware for part in fleet))
    if len(classes) < 2:
        return [()]
    first, second = classes[:2]
    advantage = {
        name: _spent(given, fleet, second, name) / _spent(given, fleet, first, name) for name in given.profiles
    }
    order = sorted(advantage, key=advantage.__getitem__)
    found: list[tuple[tuple[str, str], ...]] = [()]
    for moved in range(1, len(order)):
        chosen = {name: second if name in order[:moved] else first for name in order}
        found.append(tuple(sorted(chosen.items())))
    return found


def fleets_within(catalog: Catalog, classes: Sequence[str], budget: float) -> list[dict[str, int]]:
    """Mixtures of classes, in pairs of nodes, that cost `budget` H20 hours an hour, or up to 5 % less."""
    step = 2 * _NODE
    ranges = [range(0, int(budget / catalog.device(name).cost) + 1, step) for name in classes]
    found = []
    for counts in itertools.product(*ranges):
        cost = sum(catalog.device(name).cost * count for name, count in zip(classes, counts, strict=True))
        if cost > 0 and 0.95 * budget <= cost <= budget:
            found.append({name: count for name, count in zip(classes, counts, strict=True) if count})
    return found


def _spent(given: Simulation, fleet: Sequence[Part], hardware: str, task: str) -> float:
    part = next(part for part in fleet if part.hardware == hardware)
    speed = speed_of(given, FleetConfig(hardware=hardware, gpus=part.gpus, tensor_parallel=part.tensor_parallel))
    context = given.config.generation.max_model_len
    demand = demand_of(given.profiles[task], context, given.world.prefix_cache)
    return engine_seconds(speed, demand, 16.0)[0]


def _parts(given: Simulation, hardware: str, gpus: int) -> list[Part]:
    """Engines of the fewest devices that hold the model and some contexts, of twice and four times as many; none
    when the class cannot.
    """
    context = given.config.generation.max_model_len
    found: list[Part] = []
    for parallel in _PARALLEL:
        if gpus % parallel or len(found) == _WIDTHS:
            continue
        speed = speed_of(given, FleetConfig(hardware=hardware, gpus=gpus, tensor_parallel=parallel))
        try:
            room = speed.capacity
        except ValueError:
            continue
        if room >= _CONTEXTS * context:
            found.append(Part(hardware, gpus, parallel))
    return found


def _spread(ranked: Sequence[Candidate], width: int) -> list[Candidate]:
    """The best of each split, then each one's second best, and so on: within a split the closed form tells little."""
    rounds: dict[tuple[Part, ...], list[Candidate]] = {}
    for candidate in ranked:
        rounds.setdefault((candidate.training, *candidate.generation), []).append(candidate)
    columns = itertools.zip_longest(*rounds.values())
    return [candidate for column in columns for candidate in column if candidate is not None][:width]
