"""From a simulation's configuration to the parts of a run: engines, trainer, tasks, links, routers.

They take the places of vLLM, the trainer's processes, environments and the weight store; everything else of the run
is the product's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import count, repeat
from math import inf
from pathlib import Path
from random import Random

from msgspec import Struct

from llmproxy import AffinityRouter, GenerateRequest, GenerateResult
from llmproxy.fleet import Fleet, Slot
from llmproxy.sim import Roofline
from rollart.errors import ConfigError
from rollart.runtime.parts import Parts
from rollart.runtime.setting import Setting
from rollart.simulate.blank import Blank
from rollart.simulate.catalog import GIB
from rollart.simulate.config import FleetConfig, Simulation
from rollart.simulate.engines import Generator, Node
from rollart.simulate.errors import Stalled
from rollart.simulate.host import Host
from rollart.simulate.links import Link
from rollart.simulate.recorded import read_episodes
from rollart.simulate.rewards import Rewards, make_rewards
from rollart.simulate.tasks import ProfileTask, Weather
from rollart.simulate.trainer import Passes, Rates, SimTrainer, swap_seconds
from rollart.tasks import Mixture


class ByName(AffinityRouter):
    """Trajectories are known by their names, so what they generated is not remembered."""

    def served(self, request: GenerateRequest, slot: Slot, result: GenerateResult | None = None) -> None:
        super().served(request, slot)


class ByGroup(ByName):
    """The members of a group go where its first went."""

    def __init__(self, affinity: Mapping[str, str], random: Random) -> None:
        super().__init__(affinity, random=random)
        self._groups: dict[int, str] = {}

    def choose(self, request: GenerateRequest, fleet: Fleet) -> Slot | None:
        prompt = request.prompt_ids
        instance = prompt.instance if isinstance(prompt, Blank) else 0
        home = fleet.get(self._groups.get(instance, ""))
        if home is not None and home.serving:
            return home
        slot = super().choose(request, fleet)
        if slot is not None:
            self._groups[instance] = slot.id
        return slot


class World(Struct, frozen=True):
    """Everything that is simulated."""

    simulation: Simulation
    engines: list[Generator]
    nodes: list[Node]
    trainer: SimTrainer
    weather: Weather
    rewards: Rewards
    push: Link | None
    host: Host | None
    setting: Setting

    @property
    def links(self) -> list[Link]:
        """All that weights travel over."""
        pushes = [self.push] if self.push else []
        return list(dict.fromkeys([node.link for node in self.nodes] + pushes))

    def parts(self) -> Parts:
        """As the run sees it."""
        config = self.simulation.config
        random = Random(config.run.seed)
        router = ByGroup if self.simulation.world.placement == "group" else ByName
        return Parts(
            workers=self.engines,
            trainer=self.trainer,
            watch=self._watch,
            cpu=self.host.account if self.host else None,
            router=router(config.generation.affinity, random=random),
            prefill_router=ByName(random=random),
        )

    async def _watch(self) -> None:
        """Raises when the trainer makes no version for too long."""
        limit = self.simulation.world.stall_s
        while True:
            before = self.trainer.version
            await asyncio.sleep(limit)
            if self.trainer.version == before:
                raise Stalled(f"no train step ended in {limit:g} simulated seconds (version {before})")


def make_world(simulation: Simulation) -> World:
    """Build it on the running loop. Raises ConfigError when a model does not fit its devices."""
    check_fits(simulation)
    push = _push(simulation)
    shared = simulation.world.host
    host = Host(shared.cores, shared.turn_s) if shared else None
    nodes: list[Node] = []
    pulls = _pulls(simulation)
    engines = [engine for fleet in simulation.fleets for engine in _engines(simulation, fleet, nodes, pulls, host)]
    weather = Weather()
    rewards = make_rewards(simulation.world.rewards)
    tasks = Mixture(
        {name: _task(simulation, name, weather, rewards) for name in simulation.profiles},
        {name: task.weight for name, task in simulation.config.tasks.items()},
    )
    return World(
        simulation,
        engines,
        nodes,
        _trainer(simulation, push, host),
        weather,
        rewards,
        push,
        host,
        Setting(simulation.config, Path(), tasks),
    )


def check_fits(simulation: Simulation) -> None:
    """Raise ConfigError for the first engine that cannot hold the model."""
    for index, fleet in enumerate(simulation.fleets):
        try:
            _ = speed_of(simulation, fleet).capacity
        except ValueError as error:
            raise ConfigError(f"simulate.generation.{index}", fleet.hardware, str(error)) from None


def speed_of(simulation: Simulation, fleet: FleetConfig) -> Roofline:
    """The roofline of an engine of a fleet."""
    constants = simulation.catalog.calibration
    hardware = simulation.catalog.device(fleet.hardware)
    overhead = hardware.overhead_s if hardware.overhead_s is not None else constants.overhead_s
    return Roofline(
        hardware.device(fleet.hardware),
        simulation.shape,
        fleet.tensor_parallel,
        compute=constants.compute,
        memory=constants.memory,
        overhead=overhead,
        batch=simulation.world.batch,
    )


def _engines(
    simulation: Simulation, fleet: FleetConfig, nodes: list[Node], pulls: Iterator[Link], host: Host | None
) -> list[Generator]:
    constants = simulation.catalog.calibration
    weights = simulation.shape.parameters * simulation.shape.bytes_each
    stored = simulation.world.transport == "store"
    if stored:
        update_s = weights / (constants.load_gibs * GIB)
    elif fleet.hardware == simulation.training.hardware:
        update_s = constants.broadcast_start_s + weights / (constants.broadcast_gibs * GIB)
    else:  # each class is a cluster of its own, and between clusters there is Ethernet
        update_s = weights / (constants.pull_gibs * GIB)
    speed = speed_of(simulation, fleet)
    each = simulation.engines_a_node(fleet)
    made: list[Generator] = []
    for number in range(fleet.engines):
        if number % each == 0:
            nodes.append(Node(len(nodes), next(pulls), weights))
        engine = Generator(
            f"gen-{fleet.hardware}-{'' if fleet.role == 'both' else fleet.role}{number}",
            speed=speed,
            gpus=fleet.tensor_parallel,
            node=nodes[-1],
            pulls=stored,
            probed=simulation.world.probe,
            caches=simulation.caches,
            role=fleet.role,
            context_limit=simulation.config.generation.max_model_len,
            update_s=update_s,
            host=host,
        )
        made.append(engine)
    return made


def _pulls(simulation: Simulation) -> Iterator[Link]:
    """Each node's link to the store; one for all where the store gives them no more than so much together."""
    store, stream = simulation.world.store, simulation.catalog.calibration.pull_gibs * GIB
    if store.gibs is not None:
        return repeat(Link(store.gibs * GIB, stream, store.latency_s))
    return (Link(inf, stream, store.latency_s) for _ in count())


def _push(simulation: Simulation) -> Link | None:
    if simulation.world.transport != "store":
        return None
    rate = simulation.training.push_streams * simulation.catalog.calibration.push_gibs * GIB
    return Link(inf, rate, simulation.world.store.latency_s)


def trainer_rates(simulation: Simulation) -> Rates:
    """What the trainer's devices reach."""
    training, constants = simulation.training, simulation.catalog.calibration
    hardware = simulation.catalog.device(training.hardware)
    swap = 0.0
    if training.shared:
        parallel = simulation.fleets[0].tensor_parallel
        swap = swap_seconds(simulation.shape, training.gpus, parallel, hardware.host_gbs * 1e9)
    flops = training.gpus * hardware.tflops * 1e12 * constants.training
    step_s = training.step_s
    if step_s is None:
        step_s = constants.training_s if simulation.world.model else 0.0
    return Rates(flops=flops, swap_s=swap, step_s=step_s)


def _trainer(simulation: Simulation, push: Link | None, host: Host | None) -> SimTrainer:
    training = simulation.training
    passes = Passes(training.reference, training.proximal, training.recompute)
    work = partial(host.compute, "trainer") if host else asyncio.sleep
    return SimTrainer(simulation.shape, trainer_rates(simulation), passes, push, work)


def _task(simulation: Simulation, name: str, weather: Weather, rewards: Rewards) -> ProfileTask:
    config, profile = simulation.config, simulation.profiles[name]
    task = config.tasks[name]
    return ProfileTask(
        name,
        profile,
        read_episodes(profile.trace) if profile.trace else (),
        seed=config.run.seed,
        max_tokens=task.max_tokens,
        context=config.generation.max_model_len,
        weather=weather,
        rewards=rewards,
    )
