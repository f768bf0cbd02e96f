"""Training modes: policy objects that the one controller reads. A mode decides, it never acts."""

from __future__ import annotations

import msgspec


class Mode(msgspec.Struct, frozen=True):
    """How generation and training share time.

    `overlap`: rollout goes on while the trainer works, and a version trained in one iteration is committed in
    the next, so the trainer is one version ahead of generation. Without it generation stands still during
    training and holds the trainer's own version whenever it runs.
    """

    name: str
    overlap: bool


ROLLART = Mode("rollart", overlap=True)
SYNC = Mode("sync", overlap=False)
MODES = {mode.name: mode for mode in (ROLLART, SYNC)}
