"""The parts of a run that live outside the driver, as the driver sees them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from llmproxy import Router, Worker
from rollart.pipeline.ports import Trainer
from rollart.pipeline.probe import Scorer


class TrainingPart(Trainer, Scorer, Protocol):
    """A trainer that the parity probe can ask and that saves itself into a checkpoint's folder."""

    async def save(self, folder: Path) -> None: ...


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """Generation workers, the trainer, and what tells that one of them is gone."""

    workers: Sequence[Worker]
    trainer: TrainingPart
    watch: Callable[[], Coroutine[Any, Any, None]]
    """Returns never; raises the typed error of the first part that dies, with its name and last log lines."""
    cpu: Callable[[], Mapping[str, float]] | None = None
    """CPU seconds so far by role, `driver` among them; None where they say nothing, as in a simulation."""
    router: Router | None = None
    """How generations are placed; None for the configured affinity."""
    prefill_router: Router | None = None
    """The same for prefill, where that has workers of its own."""
    export: Callable[[Path], Coroutine[Any, Any, None]] | None = None
    """Writes the trained weights as a Hugging Face folder, where there are any."""
