"""Faults of a simulation, each at its time.

Those that are on at the same time add up, and what one did to a thing ends with the last that hits it
(tests/rollart/test_rollart_simulate_faults.py).
"""

from __future__ import annotations

import asyncio
from math import prod

from rollart.simulate.build import World
from rollart.simulate.config import FaultConfig
from rollart.simulate.engines import Generator


async def happen(world: World) -> None:
    """Let every configured fault happen."""
    faults = Faults(world)
    await asyncio.gather(*map(faults.happen, world.simulation.world.faults))


class Faults:
    """Those of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._on: list[FaultConfig] = []

    async def happen(self, fault: FaultConfig) -> None:
        await asyncio.sleep(fault.at)
        self._on.append(fault)
        for engine in self._hit(fault):
            engine.die("its node is lost") if fault.kind == "node" else engine.freeze()
        self._slow()
        await asyncio.sleep(fault.for_s)
        self._on.remove(fault)
        still = {engine.id for other in self._of(fault.kind) for engine in self._hit(other)}
        for engine in self._hit(fault):
            if engine.id not in still:
                engine.rejoin() if fault.kind == "node" else engine.thaw()
        self._slow()

    def _of(self, kind: str) -> list[FaultConfig]:
        return [fault for fault in self._on if fault.kind == kind]

    def _hit(self, fault: FaultConfig) -> list[Generator]:
        """The engines of the last nodes: those of the first are as good."""
        if fault.kind not in ("node", "freeze"):
            return []
        hit = {node.number for node in self._world.nodes[-fault.count :]}
        return [engine for engine in self._world.engines if engine.node.number in hit]

    def _slow(self) -> None:
        """Links and environments suffer from all faults that are on."""
        for link in self._world.links:
            link.throttle(prod(fault.factor for fault in self._of("link")))
        storms, weather = self._of("environments"), self._world.weather
        weather.reset_fails = max((storm.factor for storm in storms), default=0.0)
        weather.slow = prod(storm.slow for storm in storms)
