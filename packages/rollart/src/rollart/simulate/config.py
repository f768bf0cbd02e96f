"""The section `simulate` of a configuration: which devices stand where, and what the world outside them is like.

The rest of the file is a training configuration and means the same as in `rollart train`. What `simulate` leaves out
is taken from there, so any training configuration can be simulated. Held by
tests/rollart/test_rollart_simulate_config.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil, floor
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from llmproxy.sim import Shape
from llmproxy.worker import Role
from rollart.config import Config, load, parse_config
from rollart.config.schema import BufferConfig
from rollart.config.tasks import AnyTask, FrozenLakeConfig
from rollart.errors import ConfigError
from rollart.pipeline.modes import MODES
from rollart.plan import tiny_parameters
from rollart.simulate.catalog import Calibration, Catalog, Hardware, Positive, Profile, Share, builtin
from rollart.simulate.recorded import described, read_episodes
from rollart.simulate.spread import Amount

T = TypeVar("T")
Count = Annotated[int, Meta(ge=1)]
_ANY = 100_000
"""Environments at once that no check minds, until it is known how many there will be."""


class _Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class FleetConfig(_Section, frozen=True):
    """Engines of one class: `gpus / tensor_parallel` of them."""

    hardware: str
    gpus: Count
    tensor_parallel: Count = 1
    role: Role = "both"

    @property
    def engines(self) -> int:
        return self.gpus // self.tensor_parallel


class TrainingConfig(_Section, frozen=True):
    """The trainer's devices. `shared`: they are generation's own, so each train step loads its state and puts the
    engines' weights away, and back. The passes beside the update are counted as forward passes.
    """

    hardware: str
    gpus: Count
    shared: bool = False
    reference: bool = True
    proximal: bool = True
    recompute: bool = True
    """Activations are computed again for the gradient, as 32k contexts need."""
    step_s: Amount | None = None
    """Seconds of a train step that do not depend on its batch; not given, the calibrated ones."""
    push_streams: Count = 1
    """How many ranks push their parts of the weights into the store at the same time."""


class HostConfig(_Section, frozen=True):
    """One machine for everything: times of engines and trainer are CPU seconds of a thread each, and its cores are
    shared by all threads.
    """

    cores: Count
    turn_s: Amount = 0.0
    """CPU seconds of the driver for a turn."""


class RewardsConfig(_Section, frozen=True):
    """Where trajectories are scored: `inline` takes the profile's time and no device, `dedicated` a judge on devices
    of its own, `serverless` functions that come and go.
    """

    kind: Literal["inline", "dedicated", "serverless"] = "inline"
    hardware: str = "H800"
    gpus: Count = 1
    together: Count = 8
    """Trajectories that one dedicated device scores at a time."""
    call_s: Amount = 0.0
    """Network time of a serverless call."""
    cold_s: Amount = 0.0
    """How long a serverless instance that has nothing to do stays."""


class StoreConfig(_Section, frozen=True):
    """The store that weights travel through."""

    gibs: Positive | None = None
    """2**30 bytes a second for all nodes that pull at the same time; not given, each gets what a stream reaches."""
    latency_s: Amount = 0.0
    """Seconds before the first byte of each push and pull."""


class FaultConfig(_Section, frozen=True):
    """Something that goes wrong at `at` seconds and ends `for_s` later.

    `node`: the engines of `count` nodes die and come back empty. `freeze`: they stop answering. `link`: the weight
    links carry `factor` of what they should. `environments`: resets fail with probability `factor`, and everything
    takes `slow` times as long.
    """

    kind: Literal["node", "freeze", "link", "environments"]
    at: Amount
    for_s: Positive = 600.0
    count: Count = 1
    factor: Share = 0.5
    slow: Positive = 1.0


class SimulateConfig(_Section, frozen=True):
    """The world of a simulated run."""

    model: str = ""
    """A name of data/models.yaml; empty for the tiny model of the section `model`."""
    generation: tuple[FleetConfig, ...] = ()
    training: TrainingConfig | None = None
    tasks: dict[str, str | Profile] = msgspec.field(default_factory=dict)
    """For each task of the run a profile, or the name of one in data/tasks.yaml."""
    rewards: RewardsConfig = RewardsConfig()
    host: HostConfig | None = None
    transport: Literal["store", "broadcast"] = "store"
    """How weights travel: through a store, while rollout goes on, or broadcast while it stands still."""
    store: StoreConfig = StoreConfig()
    faults: tuple[FaultConfig, ...] = ()
    hardware: dict[str, Hardware] = msgspec.field(default_factory=dict)
    """Classes that the catalog does not have, or has otherwise."""
    calibration: dict[str, float] = msgspec.field(default_factory=dict)
    """Constants that differ from the catalog's."""
    prefix_cache: bool = True
    """Engines keep the contexts that they computed, and a turn computes what is new; else every turn computes its
    whole context."""
    probe: bool = True
    """The parity probe takes its turn behind the contexts that engines rebuild after an update; else it takes no
    time, as in systems that have none."""
    placement: Literal["trajectory", "group"] = "trajectory"
    """Members of a group are requests of their own, or all go to one engine, as one request for several answers does.
    """
    stall_s: Annotated[float, Meta(gt=0, le=1e7)] = 50_000.0
    """Simulated seconds without a train step after which the run is taken to hang."""
    batch: Annotated[float, Meta(ge=1, le=1e12)] = 256.0
    """The most sequences that an engine runs at once; where it is not given, generation.max_num_seqs if that is."""


class Simulation(Struct, frozen=True):
    """A configuration ready to be simulated."""

    config: Config
    world: SimulateConfig
    catalog: Catalog
    shape: Shape
    fleets: tuple[FleetConfig, ...]
    training: TrainingConfig
    profiles: dict[str, Profile]

    @property
    def batch(self) -> int:
        """Trajectories of a train step."""
        return self.config.buffer.batch_groups * self.config.buffer.group_size

    @property
    def gpus(self) -> dict[str, int]:
        """Devices by class."""
        counts: dict[str, int] = {}
        used = [(fleet.hardware, fleet.gpus) for fleet in self.fleets]
        if not self.training.shared:
            used.append((self.training.hardware, self.training.gpus))
        if self.world.rewards.kind == "dedicated":
            used.append((self.world.rewards.hardware, self.world.rewards.gpus))
        for name, gpus in used:
            counts[name] = counts.get(name, 0) + gpus
        return counts

    @property
    def caches(self) -> bool:
        """Whether engines keep contexts: not where every turn of every task begins a new one."""
        return self.world.prefix_cache and not all(profile.latest_only for profile in self.profiles.values())

    def engines_a_node(self, fleet: FleetConfig) -> int:
        return max(1, self.catalog.device(fleet.hardware).node // fleet.tensor_parallel)

    @property
    def nodes(self) -> int:
        """Hosts of engines."""
        return sum(ceil(fleet.engines / self.engines_a_node(fleet)) for fleet in self.fleets)

    @property
    def cost(self) -> float:
        """Of an hour, in hours of an H20."""
        return sum(self.catalog.device(name).cost * gpus for name, gpus in self.gpus.items())


def read_tree(path: str | Path, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """A YAML file with overrides applied, as nested dictionaries. Raises ConfigError."""
    tree = load._read(Path(path))
    for override in overrides:
        load._apply(tree, override)
    return {name: section for name, section in tree.items() if section is not None}


def load_simulation(path: str | Path, overrides: Iterable[str] = ()) -> Simulation:
    """The simulation that a YAML file describes. Raises ConfigError naming key, value and remedy."""
    return make_simulation(read_tree(path, overrides))


def make_simulation(tree: Mapping[str, Any]) -> Simulation:
    """The simulation of plain nested dictionaries. Raises ConfigError."""
    world = _world(tree.get("simulate") or {})
    rest = {name: value for name, value in tree.items() if name != "simulate" and value is not None}
    config = parse_config(_filled(rest, world))
    if "concurrency" not in rest.get("rollout", {}):
        config = replace(config, rollout=replace(config.rollout, concurrency=_most(config.buffer)))
    config = replace(config, run=replace(config.run, stop_at_success=None))  # nobody learns here
    if "max_num_seqs" in rest.get("generation", {}) and "batch" not in (tree.get("simulate") or {}):
        world = replace(world, batch=float(config.generation.max_num_seqs))
    catalog = _catalog(world)
    fleets = world.generation or _fleets(config)
    training = world.training or TrainingConfig(hardware=fleets[0].hardware, gpus=config.train.processes)
    profiles = {name: _profile(name, task, world, catalog) for name, task in config.tasks.items()}
    shape = catalog.shape(world.model) if world.model else _tiny(config)
    simulation = Simulation(config, world, catalog, shape, fleets, training, profiles)
    _check(simulation)
    return simulation


def _world(tree: Any) -> SimulateConfig:
    for section, kind in (("hardware", Hardware), ("tasks", Profile)):  # an error says the name of the entry
        named = tree.get(section) if isinstance(tree, Mapping) else None
        for name, value in named.items() if isinstance(named, Mapping) else ():
            if isinstance(value, Mapping):
                _convert(value, f"simulate.{section}.{name}", kind)
    return _convert(tree, "simulate", SimulateConfig)


def _convert(tree: Any, key: str, kind: type[T]) -> T:
    try:
        return msgspec.convert(tree, kind, strict=False)
    except msgspec.ValidationError as error:
        raise load._located(error, tree, key, kind) from None


def _filled(tree: dict[str, Any], world: SimulateConfig) -> dict[str, Any]:
    """The training configuration with what the fleet says about its engines, and patience for large runs."""
    if not all(isinstance(tree.get(name, {}), Mapping) for name in ("generation", "rollout")):
        return tree  # which is refused as it is
    generation, rollout = dict(tree.get("generation", {})), dict(tree.get("rollout", {}))
    filled = tree | {"generation": generation, "rollout": rollout}
    if world.generation:
        classes = [fleet.hardware for fleet in world.generation if fleet.role != "prefill"]
        hardware = [fleet.hardware for fleet in world.generation for _ in range(fleet.engines)]
        generation |= {"workers": len(hardware), "hardware": hardware}
        generation.setdefault("kv_cache_mb", 1 << 20)  # of real engines; simulated ones have what their devices have
        # The class "" stands for any.
        generation.setdefault("affinity", {"default": classes[0] if len(set(classes)) == 1 else ""})
        pools = [{"name": name, "hardware": name, "total": 1e6} for name in dict.fromkeys([*hardware, ""])]
        filled["pools"] = pools
        for key, value in (("step_timeout_s", 1800.0), ("turn_timeout_s", 7200.0), ("episode_timeout_s", 36000.0)):
            rollout.setdefault(key, value)
    rollout.setdefault("concurrency", _ANY)
    return filled


def _most(buffer: BufferConfig) -> int:
    """Trajectories that the buffer has room for."""
    groups = floor((1 + buffer.alpha) * buffer.batch_groups) + buffer.spare_groups
    return groups * (buffer.group_size + buffer.spare_members)


def _catalog(world: SimulateConfig) -> Catalog:
    known = builtin()
    constants = msgspec.structs.asdict(known.calibration)
    for name in world.calibration.keys() - constants.keys():
        reason = f"is not a constant; there are {', '.join(constants)}"
        raise ConfigError(f"simulate.calibration.{name}", world.calibration[name], reason)
    calibration = _convert(constants | world.calibration, "simulate.calibration", Calibration)
    return msgspec.structs.replace(known, hardware={**known.hardware, **world.hardware}, calibration=calibration)


def _fleets(config: Config) -> tuple[FleetConfig, ...]:
    """One device an engine, of the classes that the training configuration names."""
    hardware = config.generation.hardware
    each = hardware if len(hardware) == config.generation.workers else hardware * config.generation.workers
    return tuple(FleetConfig(hardware=name, gpus=each.count(name)) for name in dict.fromkeys(each))


def _profile(name: str, task: AnyTask, world: SimulateConfig, catalog: Catalog) -> Profile:
    given = world.tasks.get(name)
    if isinstance(given, Profile):
        return described(given, read_episodes(given.trace)) if given.trace else given
    if given is not None:
        return catalog.profile(given, f"simulate.tasks.{name}")
    if isinstance(task, FrozenLakeConfig):
        return catalog.profile("tiny-lake")
    if name.lower() in catalog.tasks:
        return catalog.profile(name.lower())
    reason = f"give a profile, or the name of one: {', '.join(catalog.tasks)}"
    raise ConfigError(f"simulate.tasks.{name}", None, reason)


def _tiny(config: Config) -> Shape:
    model = config.model
    dim = model.hidden // model.heads
    return Shape(float(tiny_parameters(config)), model.layers, model.heads, model.heads, dim, bytes_each=4.0)


def _check(simulation: Simulation) -> None:
    simulation.catalog.device(simulation.training.hardware, "simulate.training.hardware")
    for index, fleet in enumerate(simulation.fleets):
        simulation.catalog.device(fleet.hardware, f"simulate.generation.{index}.hardware")
        if fleet.gpus % fleet.tensor_parallel:
            reason = f"is not a multiple of tensor_parallel {fleet.tensor_parallel}"
            raise ConfigError(f"simulate.generation.{index}.gpus", fleet.gpus, reason)
    if simulation.world.rewards.kind == "dedicated":
        simulation.catalog.device(simulation.world.rewards.hardware, "simulate.rewards.hardware")
    _check_faults(simulation)
    proxies = simulation.config.generation.proxies
    if proxies > 1:
        raise ConfigError("generation.proxies", proxies, "a simulation has one, with its own router; 1 works")
    roles = {fleet.role for fleet in simulation.fleets}
    if ("prefill" in roles) != ("decode" in roles):
        raise ConfigError("simulate.generation", sorted(roles), "prefill and decode engines need each other")
    for name in simulation.world.tasks.keys() - simulation.config.tasks.keys():
        raise ConfigError(
            f"simulate.tasks.{name}", name, f"no such task; there are {', '.join(simulation.config.tasks)}"
        )
    if simulation.training.shared:
        _check_shared(simulation)


def _check_shared(simulation: Simulation) -> None:
    training, mode = simulation.training, simulation.config.run.mode
    if len(simulation.fleets) != 1:
        raise ConfigError("simulate.training.shared", True, "needs one fleet, whose devices the trainer takes")
    (fleet,) = simulation.fleets
    if training.hardware != fleet.hardware or training.gpus > fleet.gpus:
        reason = f"are generation's own where they are shared, and those are {fleet.gpus} {fleet.hardware}"
        raise ConfigError("simulate.training", f"{training.gpus} {training.hardware}", reason)
    if MODES[mode].overlap:
        reason = f"in mode {mode} engines generate while the trainer works; false works, or run.mode sync_plus"
        raise ConfigError("simulate.training.shared", True, reason)


def _check_faults(simulation: Simulation) -> None:
    for index, fault in enumerate(simulation.world.faults):
        if fault.kind in ("node", "freeze") and fault.count > simulation.nodes:
            reason = f"generation stands on {simulation.nodes} nodes; give at most so many"
            raise ConfigError(f"simulate.faults.{index}.count", fault.count, reason)
