"""What one iteration did, and the change of the served version in it. Values that the controller hands out."""

from __future__ import annotations

from typing import Any

import msgspec

from rollart.observe.steptime import StepTime
from rollart.pipeline.ports import Trained
from rollart.pipeline.weights import Staged


class Switch(msgspec.Struct, frozen=True):
    """One change of the served version: what it took, and what rollout waited for."""

    staged: Staged
    exposed_s: float
    parity: float | None
    """In nats; None where the trainer had gone on before the weights arrived, or every engine was lost after them."""
    ended: int
    """Running trajectories that it ended."""


class Iteration(msgspec.Struct, frozen=True):
    """What one iteration did."""

    step: int
    batch: Any
    served: int
    """Version that generation holds at the end of the iteration."""
    trained: Trained
    switch: Switch | None
    success: float | None
    time: StepTime
