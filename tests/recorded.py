"""`rollart`, with what is trained on noted: each train step is a line of JSON in the file that RECORD names.

Run as a module, it takes the words of the `rollart` command. A resumed run appends; of lines of one step the last
counts.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

RECORD = "ROLLART_TEST_RECORD"


def read_record(path: Path) -> list[dict[str, Any]]:
    """What each step of the finished run trained on, in order."""
    steps = {line["step"]: line for line in map(json.loads, path.read_text().splitlines())}
    return [steps[step] for step in sorted(steps)]


def note(batch: Any, step: int) -> None:
    """Appends a line; it is whole or, if the process is killed, not there."""
    groups = [
        {
            "key": group.key,
            "ages": [batch.version - sample.start_version for sample in group.samples],
            "rewards": [sample.reward for sample in group.samples],
            "paid": [sum(turn.reward for turn in sample.payload.turns) for sample in group.samples],
            "outcomes": [sample.payload.outcome.kind for sample in group.samples],
            "tasks": [sample.payload.task for sample in group.samples],
        }
        for group in batch.groups
    ]
    line = json.dumps({"step": step, "groups": groups}) + "\n"
    with open(os.environ[RECORD], "ab", buffering=0) as file:
        file.write(line.encode())


if __name__ == "__main__":
    from rollart.cli.main import main
    from rollart.roles.train_client import TrainClient

    train_step = TrainClient.train_step

    async def noted(self: TrainClient, batch: Any, step: int) -> Any:
        note(batch, step)
        return await train_step(self, batch, step)

    TrainClient.train_step = noted  # type: ignore[method-assign]
    sys.exit(main())
