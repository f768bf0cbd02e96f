"""What a step takes by the closed forms: where a search begins, not where it ends.

A trajectory's seconds on an engine come from the roofline at the number of sequences that would run there; a class's
engines share the tasks that affinity sends them. Rollout takes no less than the busiest class of engines, and than a
mean trajectory over the `alpha + 1` batches that are under way; where each batch is waited for, half of its longest
one adds to that, as those begin at any time. The trainer works and weights are on their way beside it in modes that
overlap, else after it. While engines load weights all stands still. Turns that wait for each other, in mode sync, are
not in it. Invariant: more devices never make an estimate longer (tests/rollart/test_rollart_planner_search.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, sqrt

from msgspec import Struct
from msgspec.structs import replace

from llmproxy.sim import Roofline
from rollart.pipeline.modes import MODES
from rollart.simulate.build import speed_of, trainer_rates
from rollart.simulate.catalog import GIB, Profile
from rollart.simulate.config import FleetConfig, Simulation
from rollart.simulate.trainer import Passes, forward_flops

_CHUNK = 8192  # tokens over which the time of prefilling one is taken


class Demand(Struct, frozen=True, kw_only=True):
    """What a trajectory of a task asks for on average, in tokens and seconds; `longest` over the average length."""

    turns: float
    made: float
    computed: float
    resident: float
    total: float
    waits: float
    longest: float


class Estimate(Struct, frozen=True, kw_only=True):
    """Seconds: what keeps the busiest engines busy, a mean trajectory's share, what the longest one of a batch adds
    where that is waited for, training, the weights' way to the engines, and the pause in which those load them.
    """

    generate: float
    latency: float
    tail: float
    train: float
    way: float
    pause: float
    overlap: bool

    @property
    def step(self) -> float:
        rollout = max(self.generate, self.latency) + self.tail
        if self.overlap:
            return max(rollout, self.train, self.way) + self.pause
        return rollout + self.train + self.way + self.pause


def demand_of(
    profile: Profile, context: int, caches: bool = True, *, max_turns: float = inf, max_tokens: float = inf
) -> Demand:
    """The averages of a profile, within the context and the limits of its task; without `caches`, each turn computes
    the whole of its context.
    """
    turns = max(1.0, profile.turns.cut(max_turns))
    first, later, reply = profile.prompt.average, profile.observation.average, _reply(profile, max_tokens)
    if profile.latest_only:
        computed, resident, total = turns * first, first + reply, turns * (first + reply)
    else:
        turns = min(turns, max(1.0, (context - first) / (later + reply)))
        again = 0.0 if caches else (turns - 1) * (first + (turns - 2) / 2 * later + turns / 2 * reply)
        computed = first + (turns - 1) * later + again
        total = computed + turns * reply
        resident = (first + reply + total) / 2
    varied = profile.response.std / reply / sqrt(turns) if reply else 0.0
    most = min(max_turns, profile.turns.high) if profile.turns.shape == "uniform" else turns
    longest = (most / turns) * (1 + 2 * profile.instance + 3 * varied)
    if reply:
        longest = min(longest, most * min(max_tokens, profile.response.high) / (turns * reply))
    waits = profile.reset_s.average + turns * profile.step_s.average
    return Demand(
        turns=turns,
        made=turns * reply,
        computed=computed,
        resident=resident,
        total=total,
        waits=waits,
        longest=max(1.0, longest),
    )


def task_demand(simulation: Simulation, name: str) -> Demand:
    """Of a task of a configuration."""
    context, task = simulation.config.generation.max_model_len, simulation.config.tasks[name]
    limits = {"max_turns": float(task.max_turns), "max_tokens": float(task.max_tokens)}
    return demand_of(simulation.profiles[name], context, simulation.world.prefix_cache, **limits)


def _reply(profile: Profile, most: float) -> float:
    """Tokens of an answer, some instances asking for longer ones than others."""
    response = profile.response
    if response.shape == "lognormal" and response.mean:
        varied = (1 + (response.std / response.mean) ** 2) * (1 + profile.instance**2) - 1
        response = replace(response, std=response.mean * sqrt(varied))
    return response.cut(most)


def engine_seconds(speed: Roofline, demand: Demand, together: float) -> tuple[float, float]:
    """An engine's seconds for one trajectory when so many run on it, and how long that trajectory takes there."""
    fit = max(1.0, min(together, speed.batch, speed.capacity / demand.resident))
    pace = speed.pace(max(1, round(fit)), 0.0, 0.0)
    step = pace.base + pace.slope * fit * demand.resident
    prefill = _prefill_seconds(speed, demand)
    spent = demand.made * step / fit + prefill
    return spent, demand.made * step + prefill * fit + demand.waits


def estimate(simulation: Simulation) -> Estimate:
    """The closed form for a configuration."""
    config = simulation.config
    demands = {name: task_demand(simulation, name) for name in simulation.profiles}
    weights = {name: config.tasks[name].weight for name in demands}
    total = sum(weights.values())
    alive = min((1 + config.buffer.alpha) * simulation.batch, config.rollout.concurrency)
    rounds = simulation.batch / alive
    apart = [fleet for fleet in simulation.fleets if fleet.role == "prefill"]
    generate = _prefill_apart(simulation, apart, demands, weights) if apart else 0.0
    mode, tail, latency = MODES[config.run.mode], 0.0, 0.0
    way, pause = weights_seconds(simulation)
    for hardware, fleets in _by_class(simulation).items():
        engines = sum(fleet.engines for fleet in fleets)
        share = _shares(simulation, hardware, engines)
        if not any(share.values()):
            continue
        speed = speed_of(simulation, fleets[0])
        together = alive * sum(share[name] * weights[name] for name in demands) / total / engines
        spent = 0.0
        for name, demand in demands.items():
            if fleets[0].role == "decode":
                demand = replace(demand, computed=0.0)
            each, _ = engine_seconds(speed, demand, max(1.0, alive / engines))  # all wait for the busiest class
            _, alone = engine_seconds(speed, demand, max(1.0, together))
            taken = share[name] * weights[name] / total
            spent += simulation.batch * taken * each
            latency += taken * alone * rounds
            if taken and mode.hold:
                tail = max(tail, alone * (demand.longest - 1) / 2)
        generate = max(generate, spent / engines)
    return Estimate(
        generate=generate,
        latency=latency,
        tail=tail,
        train=train_seconds(simulation, demands, weights),
        way=way,
        pause=pause,
        overlap=mode.overlap,
    )


def _prefill_apart(
    simulation: Simulation, fleets: Sequence[FleetConfig], demands: Mapping[str, Demand], weights: Mapping[str, float]
) -> float:
    """Seconds of a batch's prefill on the engines that do nothing else."""
    engines = sum(fleet.engines for fleet in fleets)
    speed = speed_of(simulation, fleets[0])
    total = sum(weights.values())
    spent = sum(weights[name] / total * _prefill_seconds(speed, demand) for name, demand in demands.items())
    return simulation.batch * spent / engines


def _prefill_seconds(speed: Roofline, demand: Demand) -> float:
    return demand.computed * speed.pace(0, float(_CHUNK), demand.resident / 2).base / _CHUNK


def train_seconds(simulation: Simulation, demands: Mapping[str, Demand], weights: Mapping[str, float]) -> float:
    """A train step over a batch of average trajectories."""
    training = simulation.training
    passes = Passes(training.reference, training.proximal, training.recompute).count
    total = sum(weights.values())
    flops = sum(
        simulation.batch * weights[name] / total * forward_flops(simulation.shape, [round(demand.total)])
        for name, demand in demands.items()
    )
    rates = trainer_rates(simulation)
    return passes * flops / rates.flops + 2 * rates.swap_s + rates.step_s


def weights_seconds(simulation: Simulation) -> tuple[float, float]:
    """From the trainer to the engines' hosts, beside rollout; and into the engines, which stand still."""
    constants = simulation.catalog.calibration
    size = simulation.shape.parameters * simulation.shape.bytes_each / GIB
    if simulation.world.transport == "broadcast":
        return 0.0, constants.broadcast_start_s + size / constants.broadcast_gibs
    push = size / constants.push_gibs / simulation.training.push_streams
    store = simulation.world.store
    pull = size / constants.pull_gibs
    if store.gibs is not None:
        pull = max(pull, size * simulation.nodes / store.gibs)
    return push + pull + 2 * store.latency_s, size / constants.load_gibs


def _by_class(simulation: Simulation) -> dict[str, list[FleetConfig]]:
    classes: dict[str, list[FleetConfig]] = {}
    for fleet in simulation.fleets:
        if fleet.role != "prefill":
            classes.setdefault(fleet.hardware, []).append(fleet)
    return classes


def _shares(simulation: Simulation, hardware: str, engines: int) -> dict[str, float]:
    """The part of each task that a class takes: all or nothing by affinity, by engines where any will do."""
    affinity = simulation.config.generation.affinity
    everywhere = engines / sum(fleet.engines for fleet in simulation.fleets if fleet.role != "prefill")
    shares: dict[str, float] = {}
    for name in simulation.profiles:
        wanted = affinity.get(name) or affinity["default"]
        shares[name] = everywhere if not wanted else float(wanted == hardware)
    return shares
