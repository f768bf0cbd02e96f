"""The parts of a run that live outside the driver, as the driver sees them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from llmproxy import Worker
from rollart.roles.train_client import TrainClient


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """Generation workers, the trainer, and what tells that one of them is gone."""

    workers: Sequence[Worker]
    trainer: TrainClient
    watch: Callable[[], Coroutine[Any, Any, None]]
    """Returns never; raises the typed error of the first part that dies, with its name and last log lines."""
