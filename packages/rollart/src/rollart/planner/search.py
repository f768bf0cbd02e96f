"""The search: every candidate is ranked by the closed form, the best are simulated, the better half of them longer.
Then the splits beside the best are, and the best with another alpha or redundancy, as long as one of them is better:
to the closed form those are much alike.
Better is what is so by more than noise; else what was given stays, or what the closed form prefers. A candidate whose
simulation fails is left out, and told.

Invariant: the configuration that is proposed was simulated, and so was the one that it is compared with
(tests/rollart/test_rollart_planner_search.py).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil, log, prod
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from rollart.errors import ConfigError
from rollart.pipeline.modes import MODES
from rollart.planner.candidate import Candidate, Part, steps_between
from rollart.planner.estimate import engine_seconds, estimate, task_demand
from rollart.planner.judge import Judged, Judges, margin
from rollart.planner.shrink import divisor
from rollart.simulate.build import speed_of
from rollart.simulate.catalog import Catalog
from rollart.simulate.config import FleetConfig, Simulation, make_simulation
from rollart.simulate.errors import Broken

_NODE = 8
_PARALLEL = (1, 2, 4, 8)
_SPLITS = 48
"""Splits that are tried, at most: those of larger fleets differ by a share of the fleet, not by a node."""
_ALIKE = 1.15
"""Splits are alike where one trains on less than about so many times the devices of the other."""
_WIDTHS = 3
_MIXTURES = 100_000
_CONTEXTS = 2
"""Whole contexts that an engine must have room for."""


class Plan(Struct, frozen=True):
    """`best` first; `start` is the configuration as it was, where it fits the devices; `steps` lead from one to the
    other. Step times of which one is longer by less than the part `margin` are as good as the same. Why simulations
    `failed` was told.
    """

    best: list[Judged]
    start: Judged | None
    steps: list[tuple[str, Judged]]
    considered: int
    simulated: int
    margin: float
    failed: int


class Search:
    """Plans for one configuration. `tell` hears of each simulation."""

    def __init__(
        self,
        tree: Mapping[str, Any],
        *,
        width: int = 10,
        rounds: Sequence[int] = (5, 8),
        alphas: Sequence[float] | None = None,
        processes: int = 1,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`width` candidates are simulated in the first of `rounds`, which are numbers of iterations: the first fill
        empty queues and say little. Of a large fleet a part is simulated, for as many times longer.
        """
        self._tree = tree
        self._width = width
        self._rounds = rounds
        self._given = make_simulation(tree)
        alpha, mode = self._given.config.buffer.alpha, MODES[self._given.config.run.mode]
        self._alphas = tuple(alphas) if alphas else (alpha,) if mode.hold else (alpha, alpha + 1)
        self._judges = Judges(tree, processes, tell)
        self._start: Candidate | None = None
        self._order: dict[Candidate, int] = {}

    def plan(self, fleets: Sequence[Mapping[str, int]], keep: int = 3) -> Plan:
        """The best of all ways to use one of `fleets` (devices by class). Raises ConfigError when none works, and
        Broken when all simulations fail.
        """
        ranked = [candidate for _, candidate in sorted(self._ranked(fleets), key=lambda item: item[0])]
        if not ranked:
            reason = f"no split of these devices, by nodes of {_NODE} that train, leaves others that hold the model"
            raise ConfigError("gpus", list(map(dict, fleets)), reason)
        self._judges.by = divisor(self._given, min(sum(fleet.values()) for fleet in fleets))
        given = given_candidate(self._given)
        fits = _used(given) in [dict(fleet) for fleet in fleets] and _can_be(self._given)
        self._start = given if fits else None
        first = [given] if self._start is not None else []
        self._order = {candidate: place for place, candidate in enumerate(dict.fromkeys(first + ranked))}
        field = _spread(ranked, self._width)
        for number, iterations in enumerate(self._rounds):
            self._judges.coming = self._coming(number, len(field), keep)
            self._judges.all(list(dict.fromkeys(field + first)), iterations)
            if not self._judges.known:
                why = self._judges.failed[0].why
                raise Broken(f"none of {len(self._judges.failed)} simulations came to its end; the first: {why}")
            field = [one.candidate for one in self._best() if one.candidate in field][: max(keep, len(field) // 2)]
        self._climb(ranked)
        self._judges.coming = 0
        if self._start is not None:
            between = [one for _, one in steps_between(self._start, self._best()[0].candidate)]
            self._judges.all(between, self._rounds[-1])
        plan = self.so_far(keep)
        assert plan is not None, "at least one round"
        return plan

    def so_far(self, keep: int = 3) -> Plan | None:
        """What is known, of a search that was interrupted too; None when nothing is."""
        best = self._best()
        if not best:
            return None
        known = {one.candidate: one for one in best}
        start = known.get(self._start) if self._start is not None else None
        steps = steps_between(start.candidate, best[0].candidate) if start is not None else []
        told = [(name, known[one]) for name, one in steps if one in known]
        simulated = len({one for one, _ in self._judges.known})
        failed = len(self._judges.failed)
        return Plan(best[:keep], start, told, len(self._order), simulated, margin(best), failed)

    def _best(self) -> list[Judged]:
        """Those that were judged longest, best first. Among those that noise may have brought to the front, what was
        given is, and then what the closed form prefers.
        """
        for iterations in reversed(self._rounds):
            judged = [one for (_, ran), one in self._judges.known.items() if ran == iterations]
            if judged:
                judged.sort(key=lambda one: (one.summary.step_s, self._place(one)))
                near = judged[0].summary.step_s * (1 + margin(judged))
                same = [one for one in judged if one.summary.step_s <= near]
                return sorted(same, key=self._place) + judged[len(same) :]
        return []

    def _place(self, judged: Judged) -> int:
        return self._order.get(judged.candidate, len(self._order))

    def _climb(self, field: Sequence[Candidate]) -> None:
        """Judge what differs little from the best one, and so on until none of that is better by more than noise."""
        around = None
        while (best := self._best()[0].candidate) != around:
            around = best
            self._judges.coming = self._rounds[-1]
            self._judges.all(beside(best, field) + self._varied(best), self._rounds[-1])

    def _varied(self, candidate: Candidate) -> list[Candidate]:
        """The same with another alpha, and with more groups or members than a batch has, or without."""
        buffer = self._given.config.buffer
        spares = itertools.product((0, max(1, buffer.batch_groups // 16)), (0, max(1, buffer.group_size // 4)))
        found = [replace(candidate, alpha=alpha) for alpha in self._alphas]
        found += [replace(candidate, spare_groups=groups, spare_members=members) for groups, members in spares]
        return [one for one in found if one != candidate]

    def _coming(self, number: int, width: int, keep: int) -> int:
        """Iterations after this round: of later ones, of a climb of one step, and of two changes at the end."""
        coming = 0
        for iterations in self._rounds[number + 1 :]:
            width = max(keep, width // 2)
            coming += iterations * width
        return coming + 8 * self._rounds[-1]

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
    advantage, and prefill apart.
    """
    catalog = given.catalog
    trains = max(gpus, key=lambda name: catalog.device(name).tflops)
    for share in range(_NODE, gpus[trains] + 1, _NODE * ceil(gpus[trains] / _NODE / _SPLITS)):
        if share == sum(gpus.values()):
            continue  # nothing would generate
        training = Part(trains, share)
        left = {name: count - (share if name == trains else 0) for name, count in gpus.items()}
        choices = [_parts(given, name, count) for name, count in left.items() if count]
        for fleet in itertools.product(*choices):
            for affinity, alpha in itertools.product(affinities(given, fleet), alphas):
                yield Candidate(fleet, training, affinity, alpha)
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
    engines = tuple(replace(part, gpus=0) for part in candidate.generation)
    training = replace(candidate.training, gpus=0)
    return replace(candidate, generation=engines, training=training), _devices(candidate)


def _devices(candidate: Candidate) -> frozenset[tuple[str, int]]:
    return frozenset(_used(candidate).items())


def _used(candidate: Candidate) -> dict[str, int]:
    """How many of each class it uses; devices that score stand beside them."""
    gpus = Counter({candidate.training.hardware: candidate.training.gpus})
    for part in candidate.generation:
        gpus[part.hardware] += part.gpus
    return dict(gpus)


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
    if (many := prod(map(len, ranges))) > _MIXTURES:
        raise ConfigError("--cost", budget, f"has {many:.0e} mixtures to look at; give less, or fewer --classes")
    found = []
    for counts in itertools.product(*ranges):
        cost = sum(catalog.device(name).cost * count for name, count in zip(classes, counts, strict=True))
        if cost > 0 and 0.95 * budget <= cost <= budget:
            found.append({name: count for name, count in zip(classes, counts, strict=True) if count})
    return found


def _can_be(given: Simulation) -> bool:
    """Whether a candidate can be as it is: the trainer has devices of its own, every engine room for the model."""
    if given.training.shared:
        return False
    try:
        return all(speed_of(given, fleet).capacity > 0 for fleet in given.fleets)
    except ValueError:
        return False


def _spent(given: Simulation, fleet: Sequence[Part], hardware: str, task: str) -> float:
    part = next(part for part in fleet if part.hardware == hardware)
    speed = speed_of(given, FleetConfig(hardware=hardware, gpus=part.gpus, tensor_parallel=part.tensor_parallel))
    return engine_seconds(speed, task_demand(given, task), 16.0)[0]


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
    """The best of each split, then each one's second best, and so on: within a split the closed form tells little.
    Splits are as good as the same where training has about as many devices.
    """
    rounds: dict[tuple[object, ...], list[Candidate]] = {}
    for candidate in ranked:
        engines = tuple(replace(part, gpus=0) for part in candidate.generation)
        about = candidate.training.hardware, round(log(candidate.training.gpus, _ALIKE))
        rounds.setdefault((about, engines, _devices(candidate)), []).append(candidate)
    columns = itertools.zip_longest(*rounds.values())
    return [candidate for column in columns for candidate in column if candidate is not None][:width]
