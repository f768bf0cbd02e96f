"""Weights & Biases: the rows of metrics.jsonl, where a project is named.

Without an API key in the environment the run is recorded offline, in `folder/wandb`, for `wandb sync` to send later:
a missing key must not stop a training. Held by tests/rollart/test_rollart_wandb.py.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from rollart.errors import ConfigError
from rollart.observe.metrics import Row

log = logging.getLogger(__name__)


class WandbRun:
    """One run of a project. A run that is continued goes on where it was."""

    def __init__(
        self, project: str, name: str, folder: Path, config: Mapping[str, Any], *, started: datetime | None
    ) -> None:
        """`started` keeps runs of one name apart: rows of a step that is there already are not taken."""
        try:
            import wandb
        except ImportError:
            raise ConfigError("run.wandb", project, "needs the package wandb: install rollart[wandb]") from None
        mode = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
        if mode == "offline":
            log.warning("run.wandb: without WANDB_API_KEY it is kept in %s; `wandb sync` sends it", folder / "wandb")
        self._run = wandb.init(
            project=project,
            name=name,
            id=f"{name}-{started:%Y%m%d-%H%M%S}" if started else name,
            dir=str(folder),
            config=dict(config),
            resume="allow",
            mode=mode,  # type: ignore[arg-type]
            settings=wandb.Settings(silent=True, console="off"),
        )

    def write(self, row: Row) -> None:
        """One iteration; what was not measured is left out."""
        self._run.log({key: value for key, value in row.items() if value is not None}, step=int(row["step"] or 0))

    def close(self) -> None:
        self._run.finish()
