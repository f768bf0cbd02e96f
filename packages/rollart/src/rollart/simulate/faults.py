"""Faults of a simulation, each at its time."""

from __future__ import annotations

import asyncio

from rollart.simulate.build import World
from rollart.simulate.config import FaultConfig


async def happen(world: World) -> None:
    """Let every configured fault happen."""
    await asyncio.gather(*(_fault(world, fault) for fault in world.simulation.world.faults))


async def _fault(world: World, fault: FaultConfig) -> None:
    await asyncio.sleep(fault.at)
    if fault.kind in ("node", "freeze"):
        await _nodes(world, fault)
    elif fault.kind == "link":
        await _links(world, fault)
    else:
        await _storm(world, fault)


async def _nodes(world: World, fault: FaultConfig) -> None:
    """The last nodes: those of the first are as good."""
    hit = {node.number for node in world.nodes[-fault.count :]}
    engines = [engine for engine in world.engines if engine.node.number in hit]
    for engine in engines:
        engine.die("its node is lost") if fault.kind == "node" else engine.freeze()
    await asyncio.sleep(fault.for_s)
    for engine in engines:
        engine.rejoin() if fault.kind == "node" else engine.thaw()


async def _links(world: World, fault: FaultConfig) -> None:
    links = [node.link for node in world.nodes] + ([world.push] if world.push else [])
    for link in links:
        link.throttle(fault.factor)
    await asyncio.sleep(fault.for_s)
    for link in links:
        link.throttle(1.0)


async def _storm(world: World, fault: FaultConfig) -> None:
    weather = world.weather
    weather.reset_fails, weather.slow = fault.factor, fault.slow
    await asyncio.sleep(fault.for_s)
    weather.reset_fails, weather.slow = 0.0, 1.0
