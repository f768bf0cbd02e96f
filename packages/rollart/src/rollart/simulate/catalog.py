"""What is known beforehand: devices, model shapes, task profiles and fitted constants, each a file of data.

The files lie in `data/` and say where their numbers come from. Names that are not there are errors that list those
that are (tests/rollart/test_rollart_simulate_catalog.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, TypeVar

import msgspec
import yaml
from msgspec import Meta, Struct

from llmproxy.sim import Device, Shape
from rollart.errors import ConfigError
from rollart.simulate.spread import Amount, Spread

T = TypeVar("T")
Positive = Annotated[float, Meta(gt=0, le=1e12)]
Share = Annotated[float, Meta(ge=0, le=1)]
GIB = float(1 << 30)


class Hardware(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device of a class; units stand in data/hardware.yaml."""

    tflops: Positive
    memory_gb: Positive
    bandwidth_tbs: Positive
    link_gbs: Positive
    network_gbs: Positive
    host_gbs: Positive
    cost: Amount
    node: Annotated[int, Meta(ge=1)]
    overhead_s: Amount | None = None
    """Seconds that launching a step of an engine takes, where it is not the calibrated one."""

    def device(self, name: str) -> Device:
        return Device(
            name,
            flops=self.tflops * 1e12,
            bandwidth=self.bandwidth_tbs * 1e12,
            memory=self.memory_gb * 1e9,
            link=self.link_gbs * 1e9,
            network=self.network_gbs * 1e9,
        )


class Profile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the episodes of a task go; fields are explained in data/tasks.yaml."""

    turns: Spread = Spread()
    prompt: Spread = Spread()
    observation: Spread = Spread()
    response: Spread = Spread()
    instance: Amount = 0.0
    latest_only: bool = False
    reset_s: Spread = Spread()
    step_s: Spread = Spread()
    reward_s: Spread = Spread()
    reset_fails: Share = 0.0
    reset_fail_s: Spread = Spread()
    step_fails: Share = 0.0
    success: Share = 0.5
    uniform: Share = 0.0
    trace: str = ""
    """A file of recorded episodes to draw from instead (rollart.simulate.recorded says what a line holds)."""

    def __post_init__(self) -> None:
        if self.trace:
            return
        for name in ("turns", "prompt", "observation", "response"):
            if getattr(self, name) == Spread():
                raise ValueError(f"{name} is missing; give it, or trace, a file of recorded episodes")


class Calibration(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fitted constants; what each was fitted to stands in data/calibration.yaml."""

    compute: Positive
    memory: Positive
    overhead_s: Amount
    training: Positive
    training_s: Amount
    push_gibs: Positive
    pull_gibs: Positive
    load_gibs: Positive
    broadcast_gibs: Positive
    broadcast_start_s: Amount


class Catalog(Struct, frozen=True):
    """All of it."""

    hardware: Mapping[str, Hardware]
    models: Mapping[str, Shape]
    tasks: Mapping[str, Profile]
    calibration: Calibration

    def device(self, name: str, key: str = "simulate.hardware") -> Hardware:
        """Raises ConfigError, which says that `key` names it."""
        return _named(key, self.hardware, name)

    def shape(self, name: str) -> Shape:
        return _named("simulate.model", self.models, name)

    def profile(self, name: str, key: str = "simulate.tasks") -> Profile:
        return _named(key, self.tasks, name)


@cache
def builtin() -> Catalog:
    """The catalog that comes with the package."""
    return Catalog(
        hardware=_read("hardware.yaml", dict[str, Hardware]),
        models=_read("models.yaml", dict[str, Shape]),
        tasks=_read("tasks.yaml", dict[str, Profile]),
        calibration=_read("calibration.yaml", Calibration),
    )


def _read(name: str, kind: type[T]) -> T:
    tree: Any = yaml.safe_load((files("rollart.simulate") / "data" / name).read_text(encoding="utf-8"))
    return msgspec.convert(tree, kind, strict=False)  # YAML 1.1 reads 8.19e9 as text


def _named(key: str, known: Mapping[str, T], name: str) -> T:
    if name not in known:
        raise ConfigError(key, name, f"is not known; give one of {', '.join(known)}")
    return known[name]
