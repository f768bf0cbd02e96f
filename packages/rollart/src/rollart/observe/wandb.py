"""Weights & Biases: the rows of metrics.jsonl, where a project is named.

Without an API key in the environment the run is recorded offline, in `folder/wandb`, for `wandb sync` to send later:
a missing key must not stop a training. Held by tests/rollart/test_rollart_wandb.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollart.errors import ConfigError
from rollart.observe.metrics import Row


class WandbRun:
    """One run of a project. A run that is continued under the same id goes on where it was."""

    def __init__(self, project: str, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError:
            raise ConfigError("run.wandb", project, "needs the package wandb: install rollart[wandb]") from None
        mode = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
        self._run = wandb.init(
            project=project,
            name=name,
            id=name,
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
