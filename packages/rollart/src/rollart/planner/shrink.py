"""A part of a fleet with the same part of its work: it takes the same time, and costs a fraction of it to simulate.

What waits for the longest of a batch waits a little less where a batch is smaller, and one batch is less like the
next; so only large fleets are shrunk, and not below what `_GROUPS` and `_GPUS` say. Of 3,008 devices an eighth was
within 2 % of the whole (tests/rollart/test_rollart_planner_shrink.py has a smaller case).
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from rollart.simulate.config import Simulation

_DIVISORS = (8, 4, 2)
_GROUPS = 32
"""A part of a batch has at least so many groups."""
_GPUS = 256
"""And a part of a fleet so many devices."""


def divisor(given: Simulation, gpus: int) -> int:
    """One in how many of everything says enough about a fleet of so many devices; 1 where it has to be whole."""
    groups, environments = given.config.buffer.batch_groups, given.config.rollout.concurrency
    if given.world.faults:  # they count nodes
        return 1
    for by in _DIVISORS:
        even = groups % by == environments % by == 0
        if even and groups // by >= _GROUPS and gpus // by >= _GPUS:
            return by
    return 1


def shrunk(tree: Mapping[str, Any], by: int) -> dict[str, Any]:
    """One in `by` of the devices, groups and environments. Engines stay whole; as many ranks push the model."""
    part: dict[str, Any] = deepcopy(dict(tree))
    buffer, rollout, world = part["buffer"], part.get("rollout") or {}, part["simulate"]
    buffer["batch_groups"] //= by
    buffer["spare_groups"] = round(buffer.get("spare_groups", 0) / by)
    if "concurrency" in rollout:
        part["rollout"] = {**rollout, "concurrency": rollout["concurrency"] // by}
    for fleet in world["generation"]:
        width = fleet.get("tensor_parallel", 1)
        fleet["gpus"] = width * max(1, round(fleet["gpus"] / by / width))
    world["training"]["gpus"] = max(1, round(world["training"]["gpus"] / by))
    store = world.get("store") or {}
    if store.get("gibs"):
        store["gibs"] /= by
    rewards = world.get("rewards") or {}
    if "gpus" in rewards:
        rewards["gpus"] = max(1, round(rewards["gpus"] / by))
    return part
